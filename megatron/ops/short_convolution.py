"""Causal depthwise convolution of a few tokens, which does not cross the boundaries of documents."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def short_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, starts: torch.Tensor | None = None,
    left: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return ``y_i = sum_j w_j x_{i-k+1+j} + bias`` for each channel; the last tap of k belongs to the token itself.

    Tokens before the token's document count as zeros. The sum is computed in fp32 for 16-bit inputs.

    Shapes:
        x      [b, s, c]
        weight [c, k], bias [c]
        starts int32 [b, s], the index in ``x`` of the first token of each token's document, negative if the document
               starts before ``x``; None: one document, which includes the tokens in ``left``
        left   [b, k - 1, c], the tokens before ``x``; None: zeros
        output [b, s, c]
    """
    length, kernel_size = x.shape[1], weight.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    padded = F.pad(x, (0, 0, kernel_size - 1, 0)) if left is None else torch.cat((left.to(x.dtype), x), dim=1)
    padded = padded.to(dtype)  # [b, k - 1 + s, c]
    *earlier_taps, last_tap = weight.to(dtype).unbind(1)  # k x [c]
    output = padded[:, kernel_size - 1 :] * last_tap
    positions = torch.arange(length, device=x.device)
    for offset, tap in enumerate(earlier_taps):
        product = padded[:, offset : offset + length] * tap
        if starts is not None:
            is_other_document = positions - (kernel_size - 1 - offset) < starts
            product = product.masked_fill(is_other_document.unsqueeze(-1), 0.0)
        output = output + product
    return (output if bias is None else output + bias.to(dtype)).to(x.dtype)

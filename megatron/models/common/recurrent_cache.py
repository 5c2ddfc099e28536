"""Cache of a recurrent mixer for generation, whose size does not depend on the number of tokens."""

from __future__ import annotations

import torch

from megatron.models.common.cache_slots import KVCacheSlots


class RecurrentCache:
    """State of a recurrent mixer after the tokens of earlier passes, and the last inputs of its convolution.

    A pass may have rows of different lengths, padded at the end (``lengths``). Padding must not change the state: a
    mixer computes it with decay 1 and input 0 (``is_padding``).

    Attributes:
        conv: [b, k-1, c], inputs of the convolution at the last k - 1 tokens; None before the first pass.
        state: state of the mixer, with the rows of the batch in its first dimension; None before the first pass.
    """

    def __init__(self, slots: KVCacheSlots) -> None:
        self.slots = slots
        self.conv: torch.Tensor | None = None
        self.state: torch.Tensor | None = None

    @property
    def lengths(self) -> torch.Tensor | None:
        """Number of tokens of each row in this pass [b]; None: no row has padding."""
        return self.slots.lengths

    def is_padding(self, length: int) -> torch.Tensor | None:
        """Return a bool tensor [b, length], True for padding, in a pass over ``length`` tokens; None: no padding."""
        if self.lengths is None:
            return None
        return torch.arange(length, device=self.lengths.device) >= self.lengths.unsqueeze(1)

    def update_conv(self, x: torch.Tensor, kernel_size: int) -> torch.Tensor:
        """Cache the last inputs of the convolution and return the inputs before this pass: zeros in the first pass.

        Shapes:
            x      [b, s, c], inputs of this pass
            output [b, kernel_size - 1, c]
        """
        num_cached = kernel_size - 1
        left = x.new_zeros(x.shape[0], num_cached, x.shape[2]) if self.conv is None else self.conv
        tokens = torch.cat((left, x), dim=1)  # [b, kernel_size - 1 + s, c]
        if self.lengths is None:
            self.conv = tokens[:, x.shape[1] :]
        else:
            indices = self.lengths.unsqueeze(1) + torch.arange(num_cached, device=x.device)  # [b, kernel_size - 1]
            self.conv = tokens.gather(1, indices.unsqueeze(2).expand(-1, -1, x.shape[2]))
        return left

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only the rows ``rows`` of the batch."""
        if self.conv is not None:
            self.conv = self.conv[rows]
        if self.state is not None:
            self.state = self.state[rows]

"""Normalisation of hidden states."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from megatron.ops.norm import rms_norm


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """Return ``x`` normalised over its last dimension, times ``weight``, plus ``bias`` where there is one."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, epsilon)


class LayerNorm(nn.Module):
    """Normalise the last dimension to mean 0 and variance 1, then scale and shift. Every rank holds all of it.

    Shapes:
        input, output [..., h]

    Args:
        bias: shift; False: scale alone.

    Attributes:
        kernel: what computes it, ``layer_norm`` or a function that is given and returns the same.

    Source: Ba et al. 2016, "Layer normalization".
    """

    kernel: Callable[..., torch.Tensor] = staticmethod(layer_norm)

    def __init__(self, hidden_size: int, epsilon: float, bias: bool = True) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel(x, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """Bring the last dimension to a mean square of 1, then scale. Every rank holds all of it.

    Shapes:
        input, output [..., h]

    Attributes:
        kernel: what computes it, ``rms_norm`` or a function that is given and returns the same.

    Source: Zhang and Sennrich 2019, "Root mean square layer normalization".
    """

    kernel: Callable[..., torch.Tensor] = staticmethod(rms_norm)

    def __init__(self, hidden_size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel(x, self.weight, self.epsilon)

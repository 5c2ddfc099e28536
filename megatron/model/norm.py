"""Normalisation of hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.ops.norm import rms_norm


class LayerNorm(nn.Module):
    """Normalise the last dimension to mean 0 and variance 1, then scale and shift. Every rank holds all of it.

    Shapes:
        input, output [..., h]

    Args:
        bias: shift; False: scale alone.

    Source: Ba et al. 2016, "Layer normalization".
    """

    def __init__(self, hidden_size: int, epsilon: float, bias: bool = True) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """Bring the last dimension to a mean square of 1, then scale. Every rank holds all of it.

    Shapes:
        input, output [..., h]

    Source: Zhang and Sennrich 2019, "Root mean square layer normalization".
    """

    def __init__(self, hidden_size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.epsilon)

"""From hidden states to logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.sizes import Place, Sizes
from megatron.mpu.layers import vocab_range
from megatron.mpu.mappings import enter_tensor_region
from megatron.mpu.shard import Shard, empty_weight


def logits_of(x: torch.Tensor, weight: torch.Tensor, place: Place) -> torch.Tensor:
    """Return ``x weight^T``, this rank's columns of the vocabulary.

    Shapes:
        x      [s, b, h], the same on every rank, or this rank's part of it, by ``place``
        weight [v/t, h], padded rows last
        output [s, b, v/t]
    """
    return F.linear(enter_tensor_region(x, **place.cut), weight)


class Head(nn.Module):
    """An output table of its own, for models whose head is not tied to the embedding."""

    def __init__(self, sizes: Sizes, place: Place) -> None:
        super().__init__()
        self.place = place
        rows, start, num_real = vocab_range(sizes.vocab_size, place.group, sizes.make_vocab_size_divisible_by)
        shard = Shard((sizes.vocab_size, sizes.hidden_size), 0, start, num_real)
        self.weight = empty_weight((rows, sizes.hidden_size), shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return logits_of(x, self.weight, self.place)

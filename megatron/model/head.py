"""From hidden states to logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from megatron.loss_chunks import WHOLE, tokens_at_once
from megatron.model.sizes import Place, Sizes
from megatron.mpu.layers import vocab_range
from megatron.mpu.mappings import enter_tensor_region
from megatron.mpu.shard import Shard, empty_weight


class LazyLogits(NamedTuple):
    """What logits are made of. The loss makes them for some tokens at a time, so that they are never all in memory.

    It is a tuple so that what looks at outputs of modules sees the hidden states in it, as the head's output; weights
    in an output are none of a sample's tensors to them.

    Args:
        at_once: tokens of a chunk.

    Shapes:
        x      [s, b, h], the same on every rank; its gradient is summed over the tensor group
        weight [v/t, h], padded rows last
        bias   [v/t] or None
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    at_once: int


Logits = torch.Tensor | LazyLogits
"""This rank's columns [s, b, v/t], or what they are made of."""


def head_output(
    x: torch.Tensor, weight: torch.Tensor, sizes: Sizes, place: Place, bias: torch.Tensor | None = None
) -> Logits:
    """Return ``x weight^T + bias``, where that is much as ``LazyLogits``: see ``megatron.loss_chunks``.

    Shapes:
        x      [s, b, h], the same on every rank, or this rank's part of it, by ``place``
        weight [v/t, h], padded rows last
        bias   [v/t]
    """
    x = enter_tensor_region(x, **place.cut)  # [s, b, h]
    num_tokens, is_on_cpu = x.shape[0] * x.shape[1], x.device.type == "cpu"
    shape = num_tokens, sizes.vocab_size, sizes.hidden_size
    at_once = tokens_at_once(sizes.loss_chunk_tokens, *shape, is_on_cpu=is_on_cpu)
    lazy = LazyLogits(x, weight, bias, at_once)
    return whole_logits(lazy) if at_once == WHOLE else lazy


def logits_of(x: torch.Tensor, weight: torch.Tensor, place: Place) -> torch.Tensor:
    """Return ``x weight^T``, this rank's columns of the vocabulary.

    Shapes:
        x      [s, b, h], the same on every rank, or this rank's part of it, by ``place``
        weight [v/t, h], padded rows last
        output [s, b, v/t]
    """
    return F.linear(enter_tensor_region(x, **place.cut), weight)


def whole_logits(logits: Logits) -> torch.Tensor:
    """Return the logits [s, b, v/t] themselves."""
    if isinstance(logits, torch.Tensor):
        return logits
    return F.linear(logits.x, logits.weight, logits.bias)


class Head(nn.Module):
    """An output table of its own, for models whose head is not tied to the embedding."""

    def __init__(self, sizes: Sizes, place: Place) -> None:
        super().__init__()
        self.sizes, self.place = sizes, place
        rows, start, num_real = vocab_range(sizes.vocab_size, place.group, sizes.make_vocab_size_divisible_by)
        shard = Shard((sizes.vocab_size, sizes.hidden_size), 0, start, num_real)
        self.weight = empty_weight((rows, sizes.hidden_size), shard)

    def forward(self, x: torch.Tensor) -> Logits:
        return head_output(x, self.weight, self.sizes, self.place)

"""Linear layers and the embedding, cut over a tensor-parallel group that they take as an argument.

Weights start as zeros and unset; ``megatron.model.init`` fills them from a counter keyed by seed and name, so that
every layout starts from the same numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.linear import linear, plus_bias
from megatron.mpu.mappings import gather_from_tensor_region, leave_tensor_region
from megatron.mpu.products import Pair, column_products
from megatron.mpu.shard import Shard, empty_weight, set_partial, set_shard


def divide(name: str, size: int, group: Group) -> int:
    """Return ``size`` over the group size.

    Raises:
        ValueError: it does not divide.
    """
    if size % group.size:
        raise ValueError(
            f"{name} must be a multiple of --model-parallel-size, got {size} and {group.size}. "
            f"Choose a multiple of {group.size} or a smaller --model-parallel-size."
        )
    return size // group.size


class ColumnParallelLinear(nn.Module):
    """``Y = X A^T + b`` with A cut by its output rows: rank i holds A_i and returns Y_i = X A_i^T + b_i.

    Shapes:
        input  [s, b, input_size], the same on every rank; with ``sequence_parallel`` [s/t, b, input_size], its part
        output [s, b, output_size/t], or [s, b, output_size] with ``gather_output``

    Args:
        has_entered: the input comes from ``enter_tensor_region``, for several layers at once.

    Raises:
        ValueError: ``output_size`` is not a multiple of the group size.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = True,
        gather_output: bool = False,
        group: Group = SINGLE,
        sequence_parallel: bool = False,
        has_entered: bool = False,
    ) -> None:
        super().__init__()
        self.group = group
        self.gather_output = gather_output
        self.sequence_parallel, self.has_entered = sequence_parallel, has_entered
        self.shares = (0,) if has_entered else ()  # the gradient of the input, for the debugger
        local = divide("output_size", output_size, group)
        start = group.rank * local
        self.weight = empty_weight((local, input_size), Shard((output_size, input_size), 0, start, local))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = set_shard(nn.Parameter(torch.zeros(local)), Shard((output_size,), 0, start, local))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = self.products(x, (self.weight, self.bias))  # [s, b, output_size/t]
        return gather_from_tensor_region(y, self.group) if self.gather_output else y

    def products(self, x: torch.Tensor, *pairs: Pair) -> tuple[torch.Tensor, ...]:
        """Return the product of ``x`` with each weight and bias. Collective."""
        if self.has_entered:
            return tuple(linear(x, weight, bias) for weight, bias in pairs)
        return column_products(x, pairs, self.group, self.sequence_parallel)


class RowParallelLinear(nn.Module):
    """``Y = X A^T + b`` with A cut by its input columns: the partial products of all ranks are summed, then b added.

    Shapes:
        input  [s, b, input_size/t], each rank its own slice
        output [s, b, output_size], the same on every rank; with ``sequence_parallel`` [s/t, b, output_size], its part

    Raises:
        ValueError: ``input_size`` is not a multiple of the group size.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = True,
        group: Group = SINGLE,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        local = divide("input_size", input_size, group)
        start = group.rank * local
        self.weight = empty_weight((output_size, local), Shard((output_size, input_size), 1, start, local))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = set_shard(nn.Parameter(torch.zeros(output_size)), Shard((output_size,)))
            if sequence_parallel:
                set_partial(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return linear(x, self.weight, self.bias)
        y = leave_tensor_region(F.linear(x, self.weight), self.group, self.sequence_parallel)  # [s, b, output_size]
        return y if self.bias is None else plus_bias(y, self.bias)  # after the sum: else the bias would count t times


def vocab_range(vocab_size: int, group: Group, divisible_by: int = 1) -> tuple[int, int, int]:
    """Return (rows held, first token, real tokens) of this rank for a vocabulary of any size.

    The table is padded to a multiple of ``divisible_by * t``; padded rows come last, are zero, and take no part in
    the softmax.
    """
    unit = divisible_by * group.size
    rows = -(-vocab_size // unit) * unit // group.size
    start = min(group.rank * rows, vocab_size)
    return rows, start, min(rows, vocab_size - start)


class VocabParallelEmbedding(nn.Module):
    """Rows of the embedding table cut over the group; tokens of other ranks contribute zero before the sum.

    Shapes:
        input  [...] token ids below ``vocab_size``
        output [..., h], the same on every rank; with ``sequence_parallel`` its part along the first dimension
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        divisible_by: int = 1,
        group: Group = SINGLE,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        rows, self.start, self.num_real = vocab_range(vocab_size, group, divisible_by)
        shard = Shard((vocab_size, hidden_size), 0, self.start, self.num_real)
        self.weight = empty_weight((rows, hidden_size), shard)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.start
        elsewhere = (local < 0) | (local >= self.num_real)
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)  # [..., h]
        own = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return leave_tensor_region(own, self.group, self.sequence_parallel)

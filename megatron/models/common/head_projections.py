"""HeadProjections: projections of hidden states to several parts of the heads, each with its own weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.layers import column_products, divide
from megatron.mpu.matrices import set_matrices
from megatron.mpu.shard import Shard, empty_weight


class HeadRows(NamedTuple):
    """Rows of a projection: ``num_heads`` heads over all tensor ranks, of ``size`` rows each."""

    num_heads: int
    size: int


class HeadProjections(nn.Module):
    """Linear projections of the same input, without biases. Each weight is sharded by heads.

    With sequence parallelism, the input is gathered once for all projections. Its gradient is reduced once.

    Shapes:
        input   [s, b, h], or this rank's shard of the sequence
        outputs [s, b, num_heads size / t] each, in the order of ``parts``

    Args:
        parts: name -> rows; the weights are attributes with these names.
    """

    def __init__(self, input_size: int, parts: Mapping[str, HeadRows], parallel: ParallelContext) -> None:
        super().__init__()
        self.group, self.sequence_parallel = parallel.group, parallel.sequence_parallel
        self.names = tuple(parts)
        for name, (num_heads, size) in parts.items():
            num_rows = divide(f"the number of heads of {name}", num_heads, parallel.group) * size
            shard = Shard((num_heads * size, input_size), 0, parallel.group.rank * num_rows, num_rows)
            weight = empty_weight((num_rows, input_size), shard)
            # Muon does not split a weight by heads that have one row each
            self.register_parameter(name, set_matrices(weight, head=size if size > 1 else 0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = [(getattr(self, name), None) for name in self.names]
        return column_products(x, pairs, self.group, self.sequence_parallel)

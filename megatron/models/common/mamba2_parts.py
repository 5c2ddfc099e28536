"""Mamba2Parts: the rows of z, x, B, C and dt of a Mamba-2 layer that a tensor rank stores and computes."""

from __future__ import annotations

import torch
from torch import nn

from megatron.models.common.model_args import ModelArgs
from megatron.mpu.groups import Group
from megatron.mpu.layers import divide
from megatron.mpu.shard import Shard, empty_weight, set_partial, set_shard
from tds.param_info import InitialValues

# A layer has a heads of d channels, and g groups of B and C. As in grouped-query attention, a/g neighbouring heads
# share a group. Heads are sharded over the t tensor ranks.
#
# | part | rows | on a rank | gradient on a rank |
# |---|---|---|---|
# | z, x | a d | of its heads | complete |
# | dt | a | of its heads | complete |
# | B, C; t divides g | g n | of its g/t groups | complete |
# | B, C; g divides t, g < t | g n | all rows are stored, one group is computed | partial (``set_partial``) |
#
# In the last case, t/g ranks compute the same B and C from equal weights, but their heads differ.

GATE, VALUE, INPUT, OUTPUT, TIME_STEP = "z", "x", "B", "C", "dt"
CONVOLVED = VALUE, INPUT, OUTPUT
"""Parts that pass the convolution."""


class Mamba2Parts:
    """Sizes and shards of the parts on one tensor rank.

    Attributes:
        num_heads, num_groups: number of heads of this rank, and of the groups that they read.

    Raises:
        ValueError: heads or groups cannot be divided over the ranks.
    """

    def __init__(self, args: ModelArgs, group: Group) -> None:
        num_heads, num_groups = args.mamba_num_heads, args.mamba_num_groups
        self.num_heads = divide("--mamba-num-heads", num_heads, group)
        if num_heads % num_groups:
            raise ValueError(
                f"--mamba-num-heads must be a multiple of --mamba-num-groups, got {num_heads} and {num_groups}. "
                "Change one of them"
            )
        if num_groups % group.size and group.size % num_groups:
            raise ValueError(
                "--mamba-num-groups must be a multiple or a divisor of --model-parallel-size, got "
                f"{num_groups} and {group.size}. Choose another --model-parallel-size"
            )
        self.num_groups = max(num_groups // group.size, 1)
        self._group, self._state_size = group, args.mamba_state_dim
        self._first_group = group.rank * num_groups // group.size
        width, state_width = num_heads * args.mamba_head_dim, num_groups * args.mamba_state_dim
        self._num_rows = {GATE: width, VALUE: width, INPUT: state_width, OUTPUT: state_width, TIME_STEP: num_heads}
        self._are_groups_shared = num_groups < group.size

    def computed_rows(self, part: str) -> int:
        """Return the number of rows of ``part`` that this rank computes."""
        if self._is_shared(part):
            return self._state_size
        return self._num_rows[part] // self._group.size

    def make_weight(self, part: str, num_columns: int, initial_values: InitialValues | None = None) -> nn.Parameter:
        """Return an uninitialized weight [rows, num_columns] of ``part`` with its shard.

        Args:
            initial_values: as in ``empty_weight``.
        """
        shape, shard = self._shard(part, num_columns)
        return self._mark(part, empty_weight(shape, shard, initial_values))

    def make_bias(self, part: str) -> nn.Parameter:
        """Return a bias of zeros [rows] of ``part`` with its shard."""
        shape, shard = self._shard(part)
        return self._mark(part, set_shard(nn.Parameter(torch.zeros(shape)), shard))

    def select(self, part: str, parameter: torch.Tensor) -> torch.Tensor:
        """Return the rows of a parameter of ``part`` that this rank computes with."""
        if not self._is_shared(part):
            return parameter
        return parameter.narrow(0, self._first_group * self._state_size, self._state_size)

    def _is_shared(self, part: str) -> bool:
        """Return True if every rank stores all rows of ``part``."""
        return self._are_groups_shared and part in (INPUT, OUTPUT)

    def _shard(self, part: str, *further_sizes: int) -> tuple[tuple[int, ...], Shard]:
        """Return the local shape and the shard of a parameter of ``part``."""
        full_shape = (self._num_rows[part], *further_sizes)
        if self._is_shared(part):
            return full_shape, Shard(full_shape)
        num_rows = full_shape[0] // self._group.size
        return (num_rows, *further_sizes), Shard(full_shape, 0, self._group.rank * num_rows, num_rows)

    def _mark(self, part: str, parameter: nn.Parameter) -> nn.Parameter:
        return set_partial(parameter) if self._is_shared(part) else parameter

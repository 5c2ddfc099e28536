"""GatedGroupNorm: the output norm of a Mamba-2 layer over groups of channels, and its gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.mpu.groups import Group
from megatron.mpu.layers import divide
from megatron.mpu.mappings import copy_to_tensor_region, reduce_from_tensor_region
from megatron.mpu.shard import Shard, set_shard


class GatedGroupNorm(nn.Module):
    """RMS norm over each of g groups of neighbouring channels, and a SiLU gate. Channels are sharded over tensor ranks.

    | ``is_gated_first`` | output | models |
    |---|---|---|
    | True | ``norm(y * silu(gate)) * weight`` | Mamba-2, Nemotron-H, Granite 4 |
    | False | ``norm(y) * weight * silu(gate)`` | Falcon-H1 |

    With fewer groups than tensor ranks, several ranks share the channels of a group and all-reduce their sums of
    squares: g values per token in forward, and g in backward.

    Shapes:
        y, gate, output [..., c/t]
        weight          [c/t]

    Args:
        size: number of channels c over all tensor ranks.
        num_groups: number of groups g over all tensor ranks.

    Raises:
        ValueError: g is neither a multiple nor a divisor of t.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 7, and its code.
    """

    def __init__(
        self, size: int, num_groups: int, epsilon: float, group: Group, *, is_gated_first: bool = True
    ) -> None:
        super().__init__()
        if num_groups % group.size and group.size % num_groups:
            raise ValueError(
                "--mamba-norm-groups must be a multiple or a divisor of --model-parallel-size, got "
                f"{num_groups} and {group.size}. Choose another --model-parallel-size"
            )
        self.epsilon, self.is_gated_first, self.group = epsilon, is_gated_first, group
        self.num_groups, self.group_size = num_groups, size // num_groups
        local_size = divide("the channels of a Mamba-2 layer", size, group)
        shard = Shard((size,), 0, group.rank * local_size, local_size)
        self.weight = set_shard(nn.Parameter(torch.ones(local_size)), shard)

    def forward(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(y.dtype, torch.float32)
        upcast, factor = y.to(dtype), F.silu(gate.to(dtype))
        if self.is_gated_first:
            upcast = upcast * factor
        normed = self._normalize(upcast) * self.weight.to(dtype)
        return (normed if self.is_gated_first else normed * factor).to(y.dtype)

    def _normalize(self, x: torch.Tensor) -> torch.Tensor:
        """Divide ``x`` [..., c/t] by the root mean square of each group."""
        num_local = max(self.num_groups // self.group.size, 1)
        by_group = x.unflatten(-1, (num_local, -1))  # [..., g_local, channels of a group on this rank]
        sums = by_group.square().sum(-1)  # [..., g_local]
        if self.num_groups < self.group.size:
            sums = self._sum_over_ranks(sums)
        return (by_group * (sums / self.group_size + self.epsilon).rsqrt().unsqueeze(-1)).flatten(-2)

    def _sum_over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum ``sums`` [..., 1] over the ranks that have channels of this rank's group. Collective."""
        group_idx = self.group.rank * self.num_groups // self.group.size
        padded = F.pad(sums, (group_idx, self.num_groups - 1 - group_idx))  # [..., g]
        totals = copy_to_tensor_region(reduce_from_tensor_region(padded, self.group), self.group)
        return totals[..., group_idx : group_idx + 1]

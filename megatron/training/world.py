"""World: this rank's device and position in the grid of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.mpu.groups import Grid, Group
from megatron.mpu.mappings import all_reduce


@dataclass(frozen=True)
class World:
    """This rank's device and position in the grid of ranks.

    Args:
        device_type: device type, such as "cpu" or "cuda".
        loss_stage: pipeline stage that computes the loss; None: the last one.
    """

    device_type: str
    device: torch.device
    grid: Grid
    local_rank: int
    loss_stage: int | None = None

    @property
    def rank(self) -> int:
        return self.grid.rank

    @property
    def reads_data(self) -> bool:
        """True if this rank reads data: the first tensor rank on the first stage and on the stage with the loss.

        All ranks in a context group read the same samples; each uses different chunks.
        """
        loss_stage = self.grid.pipe.size - 1 if self.loss_stage is None else self.loss_stage
        return self.grid.tensor.rank == 0 and self.grid.pipe.rank in (0, loss_stage)

    @property
    def decision_group(self) -> tuple[Group, torch.device]:
        """(group of all ranks, device) for all-reduces of values that are known on the host.

        An all-reduce on the training device would make the host wait for the device's queue. On a CPU, the group is
        ``grid.world``, to which the timeout of the current phase applies; otherwise it is ``grid.host``.
        """
        cpu_device = torch.device("cpu")
        return (self.grid.world if self.device == cpu_device else self.grid.host), cpu_device

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Combine each flag by a logical or over all ranks. Collective."""
        group, device = self.decision_group
        votes = torch.tensor(flags, dtype=torch.float32, device=device)
        return [vote > 0 for vote in all_reduce(votes, group, dist.ReduceOp.MAX).tolist()]

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        if self.grid.host.size > 1:
            dist.barrier(group=self.grid.host.handle)

    @property
    def name(self) -> str:
        """This rank's name for messages."""
        return self.rank_name(self.rank)

    def rank_name(self, rank: int) -> str:
        """Format a rank's name with its coordinates, for messages."""
        coordinate = self.grid.topology.coordinate(rank)
        context = f", context {coordinate.context}" if self.grid.topology.context > 1 else ""
        return f"rank {rank} (stage {coordinate.pipe}, tensor {coordinate.tensor}, data {coordinate.data}{context})"

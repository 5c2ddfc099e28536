"""World: this process, its grid of ranks and its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.mpu.groups import Grid, Group
from megatron.mpu.mappings import all_reduce


@dataclass(frozen=True)
class World:
    """This rank's device and grid."""

    kind: str
    device: torch.device
    grid: Grid
    local_rank: int
    loss_stage: int | None = None  # None: the last

    @property
    def rank(self) -> int:
        return self.grid.rank

    @property
    def reads_data(self) -> bool:
        """Whether this rank opens the corpus: the first tensor rank of the first stage and of that of the loss.

        The ranks of a context group read the same samples, each for its own pieces.
        """
        of_loss = self.grid.pipe.size - 1 if self.loss_stage is None else self.loss_stage
        return self.grid.tensor.rank == 0 and self.grid.pipe.rank in (0, of_loss)

    @property
    def decision_group(self) -> tuple[Group, torch.device]:
        """All ranks, and where the numbers lie on which they agree that each host knows by itself.

        Those of a device would make the host wait for its work. On a CPU the group is the one whose time limit is a
        step's.
        """
        on_host = torch.device("cpu")
        return (self.grid.world if self.device == on_host else self.grid.host), on_host

    def any(self, wishes: Sequence[bool]) -> list[bool]:
        """Return, for each of this rank's ``wishes``, whether any rank has it. Collective."""
        group, place = self.decision_group
        votes = torch.tensor(wishes, dtype=torch.float32, device=place)
        return [vote > 0 for vote in all_reduce(votes, group, dist.ReduceOp.MAX).tolist()]

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        if self.grid.host.size > 1:
            dist.barrier(group=self.grid.host.handle)

    @property
    def name(self) -> str:
        """This rank in words, for messages."""
        return self.name_of(self.rank)

    def name_of(self, rank: int) -> str:
        """Return any rank in words."""
        place = self.grid.topology.coordinate(rank)
        context = f", context {place.context}" if self.grid.topology.context > 1 else ""
        return f"rank {rank} (stage {place.pipe}, tensor {place.tensor}, data {place.data}{context})"

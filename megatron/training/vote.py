"""What all ranks must decide alike after a step: to stop, to save, to end for drifted weights. One small sum a step."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.mpu.mappings import all_reduce
from megatron.training.failure_files import asked_through_launcher
from megatron.training.parts import Run
from megatron.training.saver import wants_by_time

ANOTHER = "another rank was asked to stop"


class Vote(NamedTuple):
    """What the ranks have agreed on; ``reason`` to stop is this rank's own words where it has some."""

    reason: str | None
    by_time: bool
    has_drift: bool


def vote(run: Run, has_drift: bool = False) -> Vote:
    """Return what the run does after this step: what any rank wants. Collective."""
    reason = run.stop.reason(run.progress.step)
    wishes = [reason is not None, wants_by_time(run), has_drift]
    stops, by_time, drifted = _any(run, wishes)
    asked = asked_through_launcher() if stops and reason is None else None  # its signal is on the way here, too
    return Vote((reason or (f"received {asked}" if asked else ANOTHER)) if stops else None, by_time, drifted)


def is_signalled(run: Run) -> bool:
    """Return whether a signal has asked any rank to stop. Collective."""
    return _any(run, [run.stop.signal_name is not None])[0]


def _any(run: Run, wishes: list[bool]) -> list[bool]:
    group, place = run.world.council
    votes = torch.tensor(wishes, dtype=torch.float32, device=place)
    return [vote > 0 for vote in all_reduce(votes, group, dist.ReduceOp.MAX).tolist()]

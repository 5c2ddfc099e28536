"""What all ranks must decide alike after a step: to stop, to save, to end for drifted weights. One small sum a step."""

from __future__ import annotations

from typing import NamedTuple

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
    stops, by_time, drifted = run.world.any([reason is not None, wants_by_time(run), has_drift])
    asked = asked_through_launcher() if stops and reason is None else None  # its signal is on the way here, too
    return Vote((reason or (f"received {asked}" if asked else ANOTHER)) if stops else None, by_time, drifted)

"""Phases of a run, and the time limit for a rank without progress in each of them.

| phase | limit |
|---|---|
| starting, opening data, loading, the first step, evaluating, saving, ending | --phase-timeout-minutes |
| later steps | --step-timeout |

All ranks change phases together: each change begins with a barrier, to which the limit of the ending phase applies. So
no rank is in a step, with its short limit, while another rank is still saving. If a rank hangs in a step, the others
time out after the limit of the step, not after the longer limit of the next phase. The watchdog ends the job when a
limit has passed. Process groups time out shortly after it, in case no watchdog is running any more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from megatron import device, log
from megatron.config import Config
from megatron.errors import PeerError
from megatron.mpu.groups import Grid
from megatron.runtime import exit_guard, rank_status
from megatron.training.world import World
from tds.p2p.collective_scope import collective_scope
from tds.p2p.process_groups import limit_groups
from tds.watchdog.alarm import Alarms, own_store
from tds.watchdog.diagnosis import Report
from tds.watchdog.watchdog import RunWatchdog

STARTING = "starting"
OPENING_DATA = "opening data"
LOADING = "loading"
FIRST_STEP = "the first step"
STEP = "a step"
EVALUATING = "evaluating"
SAVING = "saving"
ENDING = "ending"

NET_S = 10.0
"""Seconds after the watchdog's limit at which process groups time out."""
AXES = (
    "host", "world", "model", "expert", "expert_data", "data_context", "data", "context", "pipe", "tensor_host",
    "tensor",
)  # fmt: skip
"""Axes of the grid; a process group that serves several axes is reported under the last one."""


class Sections:
    """The phases of a run on this rank, and the watchdog for their limits. Construction and ``over`` are collective.

    There are no limits without a world, or for a single rank that a user has started directly, which may be stopped in
    a debugger. A single rank started by the launcher is watched.
    """

    def __init__(self, world: World | None = None, config: Config | None = None) -> None:
        self.name = STARTING
        self._has_stepped = False
        self._step_s = self._long_s = inf
        self._watch: RunWatchdog | None = None
        self._limit_waits: Callable[[float], None] | None = None
        if world is None or config is None or (world.grid.world.size == 1 and _is_attended()):
            return
        self._world, self._grid = world, world.grid
        self._step_s, self._long_s = float(config.parallel.step_timeout_s), config.parallel.phase_timeout_s
        is_alone = world.grid.world.size == 1
        if not is_alone:
            limit_groups([world.grid.host.handle], timedelta(seconds=self._long_s + NET_S))
        store = dist.HashStore() if is_alone else own_store(_agreed_name(world.grid), "megatron/watch")
        names = [world.name_of(rank) for rank in range(world.grid.world.size)]
        titles = {handle.group_name: axis for axis, handle in _handles(world.grid)}
        alarms = Alarms(store, world.rank, names)
        self._watch = RunWatchdog(
            alarms, world.name, self._where, self._long_s, titles,
            is_busy=lambda: device.is_busy(world.device),
            on_stuck=self._leave,
            warn=log.warning,
        )  # fmt: skip
        self._limit(self._long_s)

    def follow(self, engine: Any) -> None:
        """Connect the watchdog to ``engine``, a ``StepEngine``, and bound its waits by the limits of the phases."""
        if self._watch is None:
            return
        if self._grid.pipe.size > 1:
            self._watch.exchange = engine.engine.let_watch()
            self._limit_waits = engine.engine.set_wait_limit
        self._limit(self._limit_of(self.name))

    @contextmanager
    def over(self, name: str) -> Iterator[None]:
        """Run the block in phase ``name``. Collective: all ranks enter and exit the phase together.

        After an error, this rank exits the phase without a barrier: other ranks fail by themselves or raise the same
        error.
        """
        outer = self.name
        if name == STEP and not self._has_stepped:
            name = FIRST_STEP
        self._meet(f"waiting for all ranks before {name}")
        self._enter(name)
        try:
            yield
        except BaseException:
            self._enter(outer, is_noted=False)  # the status keeps the operation that failed
            raise
        self._meet(f"waiting for all ranks at the end of {name}")
        self._enter(ENDING if self.name == STEP and outer == STARTING else outer)

    def step_done(self) -> None:
        """Count a step; called on all ranks after they have agreed on stopping and saving."""
        self._has_stepped = True
        if self._watch is not None:
            self._watch.progress += 1
        if self.name == FIRST_STEP:
            self._enter(STEP)

    def close(self) -> None:
        """Stop the watchdog."""
        if self._watch is not None:
            self._watch.close()

    def _enter(self, name: str, *, is_noted: bool = True) -> None:
        """Set the current phase and its limit; with ``is_noted``, also report it as the current operation."""
        before, self.name = self._limit_of(self.name), name
        if is_noted:
            rank_status.heartbeat_note(name)
        if self._watch is None:
            return
        self._watch.progress += 1
        if self._limit_of(name) != before:
            self._limit(self._limit_of(name))

    def _meet(self, doing: str) -> None:
        """Wait for all ranks; ``doing`` is reported as the current operation. No-op for a single rank. Collective."""
        if self._watch is not None and self._grid.world.size > 1:
            with collective_scope(self._grid.pipe.rank, doing):
                dist.barrier(group=self._grid.host.handle)

    def _where(self) -> str:
        """Return a description of this rank's current operation; called by the watchdog's threads."""
        operation = rank_status.heartbeat_now()
        if self.name in (FIRST_STEP, STEP):
            return f"in {operation or self.name}"
        return self.name if operation in (None, self.name) else f"{self.name}, {operation}"

    def _limit_of(self, name: str) -> float:
        """Return the limit of a phase in seconds."""
        return self._step_s if name == STEP else self._long_s

    def _leave(self, found: str, own: Report, linger: Callable[[], None] | None) -> None:
        """Exit this process with the current limit in the message; called by the watchdog."""
        leave_stuck(found, own, linger, self._world.name, self._watch.limit_s if self._watch else self._long_s)

    def _limit(self, limit_s: float) -> None:
        """Set the limit of the watchdog, and a slightly longer timeout for operations that start from now on."""
        if self._watch is None:
            return
        self._watch.limit_s = limit_s
        handles = {handle for axis, handle in _handles(self._grid) if axis != "host"}
        limit_groups(handles, timedelta(seconds=limit_s + NET_S))
        if self._limit_waits is not None:
            self._limit_waits(limit_s + NET_S)


def leave_stuck(found: str, own: Report, linger: Callable[[], None] | None, name: str, limit_s: float) -> None:
    """Exit this process, because a rank has made no progress within the limit.

    Args:
        found: description of the rank that is missing.
        own: report of this rank's current operation.
        name: name of this rank.
        linger: function that waits after the error has been reported, before the exit.
        limit_s: the limit in seconds.
    """
    is_named = found.startswith(name)
    if is_named:
        rank_status.note_state(rank_status.LATE)  # so that the launcher also names this rank
    message = found if is_named else f"{found}. This rank {own.words}"
    limit = f"{limit_s:g} s (--step-timeout; outside of steps --phase-timeout-minutes)"
    exit_guard.leave(PeerError(f"{message}. The limit without progress is {limit}"), name, linger)


def _handles(grid: Grid) -> list[tuple[str, Any]]:
    """Return (axis, process group) for the axes of the grid that have one."""
    groups = [(axis, getattr(grid, axis).handle) for axis in AXES]
    return [(axis, handle) for axis, handle in groups if handle is not None]


def _is_attended() -> bool:
    """Return True if a user may be at this process: it is not the launcher's, or it has a terminal as input."""
    return "MEGATRON_FAILURE_FILE" not in os.environ or os.isatty(0)


def _agreed_name(grid: Grid) -> str:
    """Return a name that is unique among the runs that share the store, and the same on every rank. Collective."""
    now = torch.tensor([time.time_ns()], dtype=torch.int64)
    dist.broadcast(now, src=0, group=grid.host.handle)
    return str(int(now))

"""Run phases, and their time limits for a rank without progress.

| phase | limit |
|---|---|
| starting, opening data, loading, the first step, evaluating, saving, ending | --phase-timeout-minutes |
| later steps | --step-timeout |

All ranks change phases together: each change begins with a barrier, under the ending phase's limit. So no rank is in a
step, with its short limit, while another rank is still saving. If a rank hangs in a step, the others time out after the
step's limit, not after the next phase's longer limit. The watchdog ends the job when a limit has passed. Process groups
time out shortly after it, in case no watchdog is running any more.
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
from tds.p2p.process_groups import set_group_timeouts
from tds.watchdog.alarm import Alarms, open_store
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

ENCODING_TIMEOUT_S = 7 * 24 * 3600.0
"""Limit of opening data if text is encoded first."""
GROUP_TIMEOUT_MARGIN_S = 10.0
"""Seconds after the watchdog's limit at which process groups time out."""
AXES = (
    "host", "world", "model", "expert", "expert_data", "expert_tensor", "data_context", "data",
    "context_outer", "context_inner", "context", "pipe", "tensor_host", "tensor",
)  # fmt: skip
"""Axes of the grid; a process group that serves several axes is reported under the last one."""


class RunPhases:
    """A run's phases on this rank, and the watchdog for their limits. Construction and ``during`` are collective.

    There are no limits without a world, or for a single rank that a user has started directly, which may be paused in
    a debugger. A single rank started by the launcher is watched.
    """

    def __init__(self, world: World | None = None, config: Config | None = None) -> None:
        self.phase = STARTING
        self._has_stepped = False
        self._step_timeout_s = self._phase_timeout_s = self._opening_timeout_s = inf
        self._watchdog: RunWatchdog | None = None
        self._set_wait_limit: Callable[[float], None] | None = None
        if world is None or config is None or (world.grid.world.size == 1 and _is_interactive()):
            return
        self._world, self._grid = world, world.grid
        self._step_timeout_s, self._phase_timeout_s = (
            float(config.parallel.step_timeout_s),
            config.parallel.phase_timeout_s,
        )
        has_text = bool(config.data.text_corpora)
        self._opening_timeout_s = max(self._phase_timeout_s, ENCODING_TIMEOUT_S if has_text else 0.0)
        if has_text and config.data.shuffle_window:  # a step may wait until its window is encoded
            self._step_timeout_s = max(self._step_timeout_s, self._phase_timeout_s)
        is_single_rank = world.grid.world.size == 1
        if not is_single_rank:
            set_group_timeouts(
                [world.grid.host.handle], timedelta(seconds=self._opening_timeout_s + GROUP_TIMEOUT_MARGIN_S)
            )
        store = dist.HashStore() if is_single_rank else open_store(_unique_run_name(world.grid), "megatron/watch")
        rank_names = [world.rank_name(rank) for rank in range(world.grid.world.size)]
        group_axes = {handle.group_name: axis for axis, handle in _handles(world.grid)}
        alarms = Alarms(store, world.rank, rank_names)
        self._watchdog = RunWatchdog(
            alarms, world.name, self._describe_operation, self._phase_timeout_s, group_axes,
            is_busy=lambda: device.is_busy(world.device),
            on_stuck=self._exit_stuck,
            warn=log.warning,
        )  # fmt: skip
        self._set_limit(self._phase_timeout_s)

    def attach_engine(self, engine: Any) -> None:
        """Connect the watchdog to ``engine``, a ``StepEngine``, and bound the engine's waits by the phase limits."""
        if self._watchdog is None:
            return
        if self._grid.pipe.size > 1:
            self._watchdog.communicator = engine.engine.stop_watchdog()
            self._set_wait_limit = engine.engine.set_wait_limit
        self._set_limit(self._phase_limit_s(self.phase))

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Run the block in phase ``name``. Collective: all ranks enter and exit the phase together.

        After an error, this rank exits the phase without a barrier: other ranks fail by themselves or raise the same
        error.
        """
        outer_phase = self.phase
        if name == STEP and not self._has_stepped:
            name = FIRST_STEP
        self._wait_for_ranks(f"waiting for all ranks before {name}")
        self._set_phase(name)
        try:
            yield
        except BaseException:
            self._set_phase(outer_phase, is_noted=False)  # the status keeps the operation that failed
            raise
        self._wait_for_ranks(f"waiting for all ranks at the end of {name}")
        self._set_phase(ENDING if self.phase == STEP and outer_phase == STARTING else outer_phase)

    def step_done(self) -> None:
        """Count a step; called on all ranks after they have agreed on stopping and saving."""
        self._has_stepped = True
        if self._watchdog is not None:
            self._watchdog.progress += 1
        if self.phase == FIRST_STEP:
            self._set_phase(STEP)

    def close(self) -> None:
        """Stop the watchdog."""
        if self._watchdog is not None:
            self._watchdog.close()

    def _set_phase(self, name: str, *, is_noted: bool = True) -> None:
        """Set the current phase and its limit; with ``is_noted``, also report it as the current operation."""
        previous_limit_s, self.phase = self._phase_limit_s(self.phase), name
        if is_noted:
            rank_status.write_operation(name)
        if self._watchdog is None:
            return
        self._watchdog.progress += 1
        if self._phase_limit_s(name) != previous_limit_s:
            self._set_limit(self._phase_limit_s(name))

    def _wait_for_ranks(self, operation: str) -> None:
        """Wait for all ranks and report ``operation`` as the current operation. No-op for one rank. Collective."""
        if self._watchdog is not None and self._grid.world.size > 1:
            with collective_scope(self._grid.pipe.rank, operation):
                dist.barrier(group=self._grid.host.handle)

    def _describe_operation(self) -> str:
        """Describe this rank's current operation; called by the watchdog's threads."""
        operation = rank_status.current_operation()
        if self.phase in (FIRST_STEP, STEP):
            return f"in {operation or self.phase}"
        return self.phase if operation in (None, self.phase) else f"{self.phase}, {operation}"

    def _phase_limit_s(self, name: str) -> float:
        if name == OPENING_DATA:
            return self._opening_timeout_s
        return self._step_timeout_s if name == STEP else self._phase_timeout_s

    def _exit_stuck(self, missing_text: str, local_report: Report, before_exit: Callable[[], None] | None) -> None:
        """Exit this process with the current limit in the message; called by the watchdog."""
        exit_stuck(
            missing_text,
            local_report,
            before_exit,
            self._world.name,
            self._watchdog.limit_s if self._watchdog else self._phase_timeout_s,
        )

    def _set_limit(self, limit_s: float) -> None:
        """Set the watchdog's limit, and a slightly longer timeout for operations that start from now on."""
        if self._watchdog is None:
            return
        self._watchdog.limit_s = limit_s
        handles = {handle for axis, handle in _handles(self._grid) if axis != "host"}
        set_group_timeouts(handles, timedelta(seconds=limit_s + GROUP_TIMEOUT_MARGIN_S))
        if self._set_wait_limit is not None:
            self._set_wait_limit(limit_s + GROUP_TIMEOUT_MARGIN_S)


def exit_stuck(
    missing_text: str, local_report: Report, before_exit: Callable[[], None] | None, rank_name: str, limit_s: float
) -> None:
    """Exit this process, because a rank has made no progress within the limit.

    Args:
        missing_text: description of the rank that is missing.
        local_report: report on this rank's current operation.
        rank_name: this rank's name.
        before_exit: called after the error has been reported, before the exit.
        limit_s: limit in seconds.
    """
    is_this_rank = missing_text.startswith(rank_name)
    if is_this_rank:
        rank_status.write_state(rank_status.LATE)  # so that the launcher also names this rank
    message = missing_text if is_this_rank else f"{missing_text}. This rank {local_report.words}"
    limit_text = f"{limit_s:g} s (--step-timeout; outside of steps --phase-timeout-minutes)"
    exit_guard.exit_with_error(
        PeerError(f"{message}. The limit without progress is {limit_text}"), rank_name, before_exit
    )


def _handles(grid: Grid) -> list[tuple[str, Any]]:
    """Return (axis, process group) for grid axes that have one."""
    groups = [(axis, getattr(grid, axis).handle) for axis in AXES]
    return [(axis, handle) for axis, handle in groups if handle is not None]


def _is_interactive() -> bool:
    """Return True if a user may be debugging this process: started without our launcher, or its input is a terminal."""
    return "MEGATRON_FAILURE_FILE" not in os.environ or os.isatty(0)


def _unique_run_name(grid: Grid) -> str:
    """Make a name that is unique among runs that share the store, and the same on every rank. Collective."""
    now = torch.tensor([time.time_ns()], dtype=torch.int64)
    dist.broadcast(now, src=0, group=grid.host.handle)
    return str(int(now))

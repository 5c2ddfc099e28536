"""EngineMonitor: an engine's bubble, trace, watchdog, schedule "auto" and stage table."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tds.action_times import Recorder, Work
from tds.bubble_timer import BubbleTimer, Row
from tds.clocks import clock_for, offset_to_wall_ns
from tds.engine import auto_schedule
from tds.engine.grid import PipelineGrid
from tds.engine.pipeline_json import PipelineSettings
from tds.engine.schedule_plan import SchedulePlan
from tds.engine.stage import Stage
from tds.engine.stage_table import gather_bubble, log_stage_table
from tds.engine.trace_window import Tracing
from tds.watchdog import watchdog
from tds.watchdog.alarm import open_store

_log = logging.getLogger("tds")


@dataclass(frozen=True)
class Names:
    """Rank names in order, and the model's layer names, which the stage table needs."""

    ranks: Sequence[str]
    layers: Sequence[str] = ()


class EngineMonitor:
    """An engine's measurements and supervision: bubble, trace, watchdog, schedule "auto" and stage table.

    The engine constructs it after its stage. Collective over all ranks.

    Args:
        owner: the trace is drawn when this object is deleted, unless it has been drawn before.
        plan: the engine's schedule plan; "auto" sets the fastest schedule in it.
        world_group: process group of all the engine's ranks.
        num_micro_batches: micro-batches per replica and step at construction.
    """

    def __init__(
        self,
        owner: Any,
        stage: Stage,
        plan: SchedulePlan,
        grid: PipelineGrid,
        settings: PipelineSettings,
        names: Names,
        world_group: Any,
        num_micro_batches: int,
    ) -> None:
        self._plan, self._stage, self.grid, self._settings, self._names = plan, stage, grid, settings, names
        self._world_group, self._num_micro_batches = world_group, num_micro_batches
        self._communicator = stage.communicator
        self._device = stage.device
        self._communicator.clock = clock_for(self._device)
        self._recorder = Recorder(self._communicator)
        self._bubble = BubbleTimer(self._communicator.clock)
        offset_ns = offset_to_wall_ns()
        origin_ns = self._agreed_time_ns(offset_ns)
        self.watchdog = self._make_watchdog(origin_ns)
        self._tracing = self._make_tracing(owner, origin_ns, offset_ns)
        self._auto = self._make_auto()
        log_stage_table(stage.module, names.layers, stage.index, grid.get_pipe_parallel_group(), self._device)

    @contextmanager
    def step(self, step: int, num_micro_batches: int) -> Iterator[None]:
        """Watch and time one ``train_batch``; record its actions if the trace or "auto" needs them.

        Args:
            step: number of updates before this one.
        """
        self._stage.span = None
        has_readers = self._tracing is not None or self._auto is not None
        recording = self._recording(step, num_micro_batches) if has_readers else nullcontext()
        with self.watchdog.watch("in train_batch"), recording:
            yield
            if self._stage.span is not None:
                start, end = self._stage.span
                self._bubble.record(start, end, list(self._communicator.waits))

    @contextmanager
    def _recording(self, step: int, num_micro_batches: int) -> Iterator[None]:
        """Record a step's actions for the trace and "auto". The trace also gets the actions of a failed step."""
        if self._auto is not None:
            self._auto.before_step(num_micro_batches)
        is_traced = self._tracing is not None and self._tracing.records_step
        is_recorded = is_traced or (self._auto is not None and self._auto.should_measure)
        schedule = self._plan.name
        self._stage.recorder = self._recorder if is_recorded else None
        work: list[Work] | None = None
        is_complete = False
        try:
            yield
            is_complete = True
        finally:
            self._stage.recorder = None
            if is_recorded:
                work = self._recorder.drain(is_complete=is_complete)
            if is_traced and work is not None and self._tracing is not None:
                self._tracing.write(work, step=step, schedule=schedule, num_micro_batches=num_micro_batches)
        if self._auto is not None:
            self._auto.observe(work, num_micro_batches)

    @contextmanager
    def watching(self, phase: str) -> Iterator[None]:
        """Name this rank's current phase, such as "in eval_batch", for the watchdog."""
        with self.watchdog.watch(phase):
            yield

    def keep_schedule(self) -> None:
        """Stop "auto" from changing the schedule, because the program has set one on every rank."""
        if self._auto is not None:
            self._auto.keep_schedule()

    def bubble(self, reader: str = "program") -> float | None:
        """Return the idle fraction in the training steps since this reader's last call.

        Collective over the pipeline.
        """
        group = self.grid.get_pipe_parallel_group()
        with self.watching("measuring the bubble"):
            return gather_bubble(self._bubble.drain(reader), self._stage.index, group, self._device)

    def step_times(self, reader: str) -> list[Row]:
        """Return the training step times since this reader's last call."""
        return self._bubble.drain(reader)

    def close(self) -> None:
        """Draw the trace, if there is one."""
        if self._tracing is not None:
            self._tracing.close()

    def _agreed_time_ns(self, offset_ns: int) -> int:
        """Broadcast rank 0's wall-clock time: the origin of traces and a unique name for this engine. Collective."""
        now_ns = torch.tensor([time.perf_counter_ns() + offset_ns], dtype=torch.int64, device=self._device)
        if dist.get_world_size() > 1:
            dist.broadcast(now_ns, src=0)
        return int(now_ns)

    def _make_watchdog(self, origin_ns: int) -> watchdog.EngineWatchdog:
        names, limit = list(self._names.ranks), self._communicator.links.timeout
        store = open_store(str(origin_ns)) if len(names) > 1 else None
        limit_s = math.inf if limit is None else limit.total_seconds()
        return watchdog.EngineWatchdog(self._communicator, store, dist.get_rank(), names, limit_s)

    def _make_tracing(self, owner: Any, origin_ns: int, offset_ns: int) -> Tracing | None:
        if self._settings.trace is None:
            return None
        stage, grid = self._stage, self.grid
        metadata = {
            "stage": stage.index, "num_stages": stage.num_stages, "num_chunks": stage.num_chunks,
            "placement": stage.placement.style,
            "num_micro_batches": self._num_micro_batches, "schedule": self._plan.name,
            "replica": grid.get_data_parallel_rank(), "tensor_rank": grid.get_slice_parallel_rank(),
        }  # fmt: skip
        folder, num_steps = self._settings.trace
        return Tracing(owner, folder, num_steps, dist.get_rank(), metadata, origin_ns=origin_ns, offset_ns=offset_ns)

    def _make_auto(self) -> auto_schedule.AutoSchedule | None:
        placement = self._stage.placement
        setting = auto_schedule.parse_auto(self._settings.schedule)
        if setting is None:
            return None
        return auto_schedule.AutoSchedule(
            self._plan.set_schedule, auto_schedule.allowed_schedules(setting, placement), placement=placement,
            stage=self._stage.index, group=self._world_group, device=self._device,
        )  # fmt: skip

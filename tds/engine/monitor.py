"""What an engine measures and says: bubble, traced steps, watchdog, steps_per_print, table of stages."""

from __future__ import annotations

import itertools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tds import trace
from tds.deepspeed_api import layer_specs, log_dist, places_of
from tds.deepspeed_api import logger as _deepspeed_logger
from tds.engine import auto_schedule
from tds.engine.engine_parts import EngineParts
from tds.layer_profiler import LayerCost, name_of_layer
from tds.log import log_rank_0
from tds.loss import MeanLosses
from tds.p2p.communicator import collective_scope
from tds.schedule import LOOP, Placement
from tds.timers import BubbleTimer, Recorder, Row, Work, clock_for, offset_to_wall_ns
from tds.watchdog import watchdog
from tds.watchdog.alarm import own_store

_log = logging.getLogger("tds")

# Which steps of a run are traced, and the picture at its end: within a step it would keep the other ranks waiting.


def asked_window(section: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return (folder, number of steps) that the JSON's "pipeline" section asks for, or None.

    Raises:
        ValueError: "trace" is no folder's name, or "trace_steps" no whole number of 1 or more.
    """
    folder, number = section.get("trace"), section.get("trace_steps", trace.DEFAULT_STEPS)
    if folder is None:
        if "trace_steps" in section:
            raise ValueError('"pipeline": {"trace_steps": ...} has no effect without "trace": name a folder there')
        return None
    if not isinstance(folder, str) or not folder:
        raise ValueError(f'"pipeline": {{"trace": ...}} must be the name of a folder, got {folder!r}')
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f'"pipeline": {{"trace_steps": ...}} must be a whole number of 1 or more, got {number!r}')
    return folder, number


class Tracing:
    """Writes the first steps of one rank; on rank 0 the last of them is drawn at the end.

    A folder or file that cannot be written is told once, and this rank goes on without a trace: the others do not wait.

    Args:
        owner: the end is when ``close`` is called, or this goes, or the program ends.
        about: "stage", "replica" and what else the file says of itself.
        origin_ns: what times count from, on the clock of ``Work`` plus ``offset_ns``.
    """

    def __init__(
        self, owner: Any, folder: str, num_steps: int, rank: int, about: Mapping[str, Any], *, origin_ns: int,
        offset_ns: int,
    ) -> None:  # fmt: skip
        self._about = {**about, "max_steps": num_steps, "run": origin_ns}
        self._left = num_steps
        self._file: trace.TraceFile | None = None
        try:
            self._file = trace.TraceFile(folder, rank, self._about)
        except OSError as error:
            self._give_up(error)
        self._origin_ns = origin_ns - offset_ns
        from tds.plot import draw  # only where it is wanted: it imports matplotlib

        self._picture = weakref.finalize(owner, draw, Path(folder)) if rank == 0 else None

    @property
    def records_step(self) -> bool:
        """True if the step that comes is to be traced."""
        return self._left > 0

    def close(self) -> None:
        """Draw the picture now, if this is rank 0 and it is not drawn yet."""
        if self._picture is not None:
            self._picture()

    def write(self, work: Sequence[Work], *, step: int, schedule: str, num_micro_batches: int) -> None:
        """Add a step to the file."""
        if self._file is None:
            return
        self._left -= 1
        place = {"replica": self._about["replica"], "stage": self._about["stage"], "origin_ns": self._origin_ns}
        more = trace.events(work, step=step, schedule=schedule, num_micro_batches=num_micro_batches, **place)
        try:
            self._file.add(more)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Trace no more. No run ends for a trace."""
        rank, problem = dist.get_rank() if dist.is_initialized() else 0, f"{type(error).__name__}: {error}"
        _log.warning("rank %d goes on without a trace, which cannot be written (%s)", rank, problem)
        self._left, self._file = 0, None


# The lines that the JSON's "steps_per_print" and "wall_clock_breakdown" ask for, written by rank 0.
#
# "steps_per_print" speaks through DeepSpeed's logger, so it is heard where DeepSpeed's own lines are; the timers print
# in any case, as DeepSpeed's do. Both tell means over the steps since the last line. DeepSpeed's monitors (TensorBoard,
# CSV, ...) get every step and every evaluation, under DeepSpeed's names. Where there are stages to wait for, the line
# has the bubble of its steps, and so have the monitors; what ``engine.bubble()`` tells does not change by that.

FORWARD, BACKWARD, REDUCTION, STEP, TRAIN_BATCH = "forward", "backward", "reduction", "step", "train_batch"
PARTS = (FORWARD, BACKWARD, REDUCTION, STEP, TRAIN_BATCH)
"""What train_batch has beyond the sum of the others is waiting for the other stages."""


def untimed(_: str) -> AbstractContextManager[None]:
    """Measure nothing."""
    return nullcontext()


class StepReport:
    """Measures the training steps of one engine.

    Args:
        bubble: returns that of the steps since it was last called. Collective over the pipeline.
    """

    def __init__(self, engine: EngineParts, bubble: Callable[[], float | None]) -> None:
        self._engine, self._measured = engine, bubble
        self._num_steps = 0
        self._elapsed_s = 0.0
        self.part = self._timed if engine.wall_clock_breakdown() else untimed

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the time spent within to the timer ``name``; on a GPU that of the device."""
        timer = self._engine.timers(name)
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure one train_batch, and write the lines that are due after it."""
        began = time.perf_counter()
        with self.part(TRAIN_BATCH):
            yield
        self._elapsed_s += time.perf_counter() - began
        self._num_steps += 1
        every = self._engine.steps_per_print()
        if self._engine.global_steps % (every or 1) == 0:
            self._write(None if every is None or self._engine.num_stages == 1 else self._bubble(), every is not None)
            self._num_steps, self._elapsed_s = 0, 0.0

    def _bubble(self) -> float | None:
        """Return the bubble since the last line, told to the monitors too. Collective over the pipeline."""
        bubble = self._measured()
        if bubble is not None:
            _write_events(self._engine, {"bubble": bubble})
        return bubble

    def _write(self, bubble: float | None, has_line: bool) -> None:
        engine = self._engine
        if engine.wall_clock_breakdown():
            engine.timers.log(list(PARTS), normalizer=self._num_steps)
            for timer in engine.timers.get_timers().values():  # DeepSpeed's hooks run some more, which would grow
                timer.reset()
        if has_line and engine.global_rank == 0 and _deepspeed_logger.isEnabledFor(logging.INFO):
            step_s = self._elapsed_s / self._num_steps
            others = "".join(f"{name}: {mean:0.4f} " for name, mean in (engine.agg_additional_losses or {}).items())
            log_dist(
                f"steps: {engine.global_steps} loss: {engine.agg_train_loss:0.4f} {others}iter time (s): {step_s:0.3f} "
                f"samples/sec: {engine.train_batch_size() / step_s:0.3f}"
                + ("" if bubble is None else f" bubble: {100 * bubble:0.1f} %"),
                ranks=[0],
            )


def write_training(engine: EngineParts, means: MeanLosses) -> None:
    """Tell the monitors the losses of a step, the learning rate and, with fp16, the scale of the loss."""
    loss, *others = means.numbers.items()
    values = {"train_loss": loss[1]} | dict(others)
    values["lr"] = engine.get_lr()[0]
    if engine.fp16_enabled():
        values["loss_scale"] = engine.optimizer.loss_scale
    _write_events(engine, values)


def write_evaluation(engine: EngineParts, means: MeanLosses) -> None:
    """Tell the monitors the losses of an evaluation."""
    loss, *others = means.numbers.items()
    _write_events(engine, {"eval_loss": loss[1], **{f"eval_{name}": mean for name, mean in others}})


def _write_events(engine: EngineParts, values: dict[str, float]) -> None:
    if engine.global_rank == 0 and engine.monitor.enabled:
        engine.monitor.write_events(
            [(f"Train/Samples/{name}", value, engine.global_samples) for name, value in values.items()]
        )


# The table of stages that rank 0 writes once: which layers lie where, and what they cost.

MEBI = 2**20


@dataclass(frozen=True)
class Piece:
    """One run of layers on a stage. Times and activations are of one micro-batch; None if nobody measured them."""

    stage: int
    chunk: int
    layers: str
    parameters: int
    weight_bytes: int
    costs: Sequence[LayerCost] | None = None

    def cells(self) -> list[str]:
        row = [f"{self.stage}" + (f".{self.chunk}" if self.chunk else ""), self.layers, f"{self.parameters:,}"]
        row.append(f"{self.weight_bytes / MEBI:.1f}")
        if self.costs is not None:
            row.append(f"{sum(each.forward_s for each in self.costs) * 1e3:.2f}")
            row.append(f"{sum(each.backward_s for each in self.costs) * 1e3:.2f}")
            row.append(f"{sum(each.activation_bytes for each in self.costs) / MEBI:.1f}")
        return row


def table(pieces: Sequence[Piece]) -> str:
    """Return the table as text, one line for each piece in the order of the layers."""
    heads = ["stage", "layers", "parameters", "weights MiB"]
    if any(piece.costs is not None for piece in pieces):
        heads += ["forward ms", "backward ms", "activations MiB"]
    rows = [heads, *(piece.cells() for piece in pieces)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index == 1 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def format_layers(names: Sequence[str], start: int) -> str:
    """Return "3-6 Block x 3, Norm": the numbers of the first and last layer, and the names in their order."""
    runs = [(name, len(list(same))) for name, same in itertools.groupby(names)]
    span = f"{start}" if len(names) == 1 else f"{start}-{start + len(names) - 1}"
    return f"{span} " + ", ".join(name if number == 1 else f"{name} x {number}" for name, number in runs)


def write(module: Any, stage: int, group: Any, device: torch.device) -> None:
    """Write the table of ``module`` on rank 0: to be seen after a probe, else as information. Collective."""
    num_chunks = getattr(module, "chunks", 1)
    counts = _gathered(module, stage, num_chunks, group, device)
    placement = Placement(len(counts), num_chunks, getattr(module, "placement", LOOP))
    cut = getattr(module, "profile", None)
    names = [name_of_layer(spec) for spec in layer_specs(module)]
    pieces = []
    for index, (start, stop) in enumerate(itertools.pairwise(module.parts)):
        chunk, owner = index // len(counts), placement.stage_of(index)
        parameters, weight_bytes = counts[owner][chunk]
        costs = None if cut is None else cut.layers[start:stop]
        pieces.append(Piece(owner, chunk, format_layers(names[start:stop], start), parameters, weight_bytes, costs))
    if dist.get_rank() != 0:
        return
    if cut is not None:
        log_rank_0(f"stages by measured time, per micro-batch:\n{table(pieces)}")
    else:
        _log.info("stages:\n%s", table(pieces))


def _gathered(
    module: Any, stage: int, num_chunks: int, group: Any, device: torch.device
) -> list[list[tuple[int, int]]]:
    """Return (parameters, their bytes) of each chunk of each stage. Collective over the pipeline."""
    own = []
    for chunk in range(num_chunks):
        parameters = list(module.parameters()) if num_chunks == 1 else module.parameters_of(chunk)
        own.append((sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)))
    if dist.get_world_size(group) == 1:
        return [own]
    mine = torch.tensor(own, dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with collective_scope(stage, "counting the parameters of the stages"):
        dist.all_gather(every, mine, group=group)
    return [[(int(number), int(size)) for number, size in each.tolist()] for each in every]


def bubble_of(stages: Sequence[Sequence[Row]]) -> float | None:
    """Return the share of idle time over all stages and steps; None without a step."""
    idle_ns = total_ns = 0
    for rows in zip(*stages, strict=True):
        step_ns = max(row[1] for row in rows) - rows[0][0]
        busy_ns = sum(ended - began - waited for began, ended, waited in rows)
        total_ns += step_ns * len(rows)
        idle_ns += max(0, step_ns * len(rows) - busy_ns)
    return idle_ns / total_ns if total_ns else None


def gathered_bubble(rows: Sequence[Row], stage: int, group: Any, device: torch.device) -> float | None:
    """Return the bubble of the steps whose ``rows`` each stage brings. Collective over the pipeline's ``group``."""
    if dist.get_world_size(group) == 1:
        return bubble_of([rows])
    own = torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, 3)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with collective_scope(stage, "gathering the times of the stages"):
        dist.all_gather(every, own, group=group)
    return bubble_of([[(int(b), int(e), int(w)) for b, e, w in each.tolist()] for each in every])


# What an engine shows of itself: the bubble, traces, the watchdog, what "auto" chose, the table of stages.


class EngineMonitor:
    """Made by the engine once its stage stands. Collective over all ranks.

    Args:
        stage, plan: the engine's; a schedule that is measured to be better is set in ``plan``.
    """

    def __init__(self, engine: EngineParts, stage: Any, plan: Any) -> None:
        self._engine, self._plan = engine, plan
        self._stage = stage
        self._exchange = stage.exchange
        self._device = torch.device(engine.device)
        self._exchange.clock = clock_for(self._device)
        self._recorder = Recorder(self._exchange)
        self._bubble = BubbleTimer(self._exchange.clock)
        offset_ns = offset_to_wall_ns()
        origin_ns = self._agreed_time_ns(offset_ns)
        self.watchdog = self._make_watchdog(origin_ns)
        self._tracing = self._make_tracing(origin_ns, offset_ns)
        self._auto = self._make_auto()
        write(engine.module, engine.stage_id, engine.grid.get_pipe_parallel_group(), self._device)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch and measure one train_batch, and record it where that is asked for."""
        self._stage.span = None
        has_readers = self._tracing is not None or self._auto is not None
        with self.watchdog.over("in train_batch"), self._recording() if has_readers else nullcontext():
            yield
            if self._stage.span is not None:
                began, ended = self._stage.span
                self._bubble.note(began, ended, list(self._exchange.waits))

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Record the actions of a step for the trace and "auto"; an error loses nothing of what was recorded."""
        if self._auto is not None:
            self._auto.before_step(self._engine.micro_batches)
        is_traced = self._tracing is not None and self._tracing.records_step
        is_recorded = is_traced or (self._auto is not None and self._auto.measures)
        about = {"step": self._engine.global_steps, "schedule": self._plan.name}
        self._stage.recorder = self._recorder if is_recorded else None
        work: list[Work] | None = None
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            self._stage.recorder = None
            if is_recorded:
                work = self._recorder.take(is_whole=is_whole)
            if is_traced and work is not None and self._tracing is not None:
                self._tracing.write(work, num_micro_batches=self._engine.micro_batches, **about)
        if self._auto is not None:
            self._auto.observe(work, self._engine.micro_batches)

    @contextmanager
    def watching(self, phase: str) -> Iterator[None]:
        """Let the watchdog know what this rank is in, such as "in eval_batch"."""
        with self.watchdog.over(phase):
            yield

    def keep_schedule(self) -> None:
        """Let "auto" leave the schedule alone from now on: the program has set one, on every rank."""
        if self._auto is not None:
            self._auto.keep_schedule()

    def bubble(self, reader: str = "program") -> float | None:
        """Return the share of idle time in the training steps since this reader's last call.

        Collective over the pipeline.
        """
        group = self._engine.grid.get_pipe_parallel_group()
        with self.watching("measuring the bubble"):
            return gathered_bubble(self._bubble.drain(reader), self._engine.stage_id, group, self._device)

    def rows(self, reader: str) -> list[Row]:
        """Return the times of the training steps since this reader's last call."""
        return self._bubble.drain(reader)

    def close(self) -> None:
        """Finish what is to be done at the end of a run: the picture of the trace."""
        if self._tracing is not None:
            self._tracing.close()

    def _agreed_time_ns(self, offset_ns: int) -> int:
        """Return the wall clock of rank 0: the origin of traces, and a name that no other engine has. Collective."""
        now = torch.tensor([time.perf_counter_ns() + offset_ns], dtype=torch.int64, device=self._device)
        if dist.get_world_size() > 1:
            dist.broadcast(now, src=0)
        return int(now)

    def _make_watchdog(self, origin_ns: int) -> watchdog.EngineWatchdog:
        grid, limit = self._engine.grid, self._exchange.links.timeout
        names = [watchdog.name_of(rank, place) for rank, place in enumerate(places_of(grid))]
        store = own_store(str(origin_ns)) if len(names) > 1 else None
        limit_s = math.inf if limit is None else limit.total_seconds()
        return watchdog.EngineWatchdog(self._exchange, store, dist.get_rank(), names, limit_s)

    def _make_tracing(self, origin_ns: int, offset_ns: int) -> Tracing | None:
        asked = asked_window(self._engine.pipeline_section)
        if asked is None:
            return None
        engine, grid = self._engine, self._engine.grid
        about = {
            "stage": engine.stage_id, "num_stages": engine.num_stages, "num_chunks": self._stage.num_chunks,
            "placement": self._stage.placement.kind,
            "num_micro_batches": engine.micro_batches, "schedule": self._plan.name,
            "replica": grid.get_data_parallel_rank(), "tensor_rank": grid.get_slice_parallel_rank(),
        }  # fmt: skip
        return Tracing(engine, *asked, dist.get_rank(), about, origin_ns=origin_ns, offset_ns=offset_ns)

    def _make_auto(self) -> auto_schedule.Auto | None:
        engine, placement = self._engine, self._stage.placement
        asked = auto_schedule.asked_for(engine.pipeline_section.get("schedule"))
        if asked is None:
            return None
        return auto_schedule.Auto(
            self._plan.set, auto_schedule.choices(asked, placement), placement=placement, stage=engine.stage_id,
            group=engine.module.world_group, device=self._device,
        )  # fmt: skip

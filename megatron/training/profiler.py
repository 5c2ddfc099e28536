"""--profile: torch traces of all ranks, slowest operators; the pipeline picture."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from megatron import files, log
from megatron.training.run import Run
from megatron.training.timeouts import SAVING
from megatron.training.train_step import DataIterator, StepResult
from tds import plot

# Operators and kernels of a profile: sums over ranks, and the table of those that take longest.

WRITTEN = 40


class Operator(NamedTuple):
    """Own time of one operator or kernel, without what it calls, in microseconds."""

    name: str
    calls: int
    host_us: float
    device_us: float


def operators_of(averages: Iterable[Any]) -> list[Operator]:
    """Return the operators of a profile's ``key_averages()``."""
    return [
        Operator(each.key, each.count, each.self_cpu_time_total, getattr(each, "self_device_time_total", 0.0))
        for each in averages
        if not each.key.startswith(("step ", "ProfilerStep"))
    ]


def joined(of_ranks: Iterable[Iterable[Operator]]) -> list[Operator]:
    """Return the sums over ranks by name, the longest first: by time on devices where there is any, else on hosts."""
    sums: dict[str, Operator] = {}
    for name, calls, host_us, device_us in (each for rank in of_ranks for each in rank):
        so_far = sums.get(name, Operator(name, 0, 0.0, 0.0))
        sums[name] = Operator(name, so_far.calls + calls, so_far.host_us + host_us, so_far.device_us + device_us)
    found = list(sums.values())
    has_device = any(each.device_us for each in found)
    return sorted(found, key=lambda each: (-(each.device_us if has_device else each.host_us), each.name))


def table(shown: list[Operator], steps: int, ranks: int, of: list[Operator] | None = None) -> str:
    """Return the operators as text: own milliseconds of a step and rank, their share, and calls.

    Args:
        of: all operators, where ``shown`` are some.
    """
    named: list[tuple[str, Callable[[Operator], float]]] = [("host", lambda each: each.host_us)]
    if any(each.device_us for each in of or shown):
        named.insert(0, ("device", lambda each: each.device_us))
    runs = steps * ranks
    wholes = [sum(map(time, of or shown)) or 1.0 for _, time in named]
    width = max((len(each.name) for each in shown[:WRITTEN]), default=8)
    head = "".join(f"{name + ' ms':>12} {'share':>7}" for name, _ in named)
    lines = [f"{'operator':<{width}}{head} {'calls':>9}", ""]
    for each in shown[:WRITTEN]:
        times = [(time(each), whole) for (_, time), whole in zip(named, wholes, strict=True)]
        cells = "".join(f"{us / 1e3 / runs:>12.3f} {100 * us / whole:>5.1f} %" for us, whole in times)
        lines.append(f"{each.name:<{width}}{cells} {each.calls / runs:>9.1f}")
    lines[1] = "own time of one step of one rank, the mean over all"
    return "\n".join(lines)


# --profile: torch's profiler over some steps, a trace of each rank, and the operators that take longest over all.
#
# | in RUN/profile | holds |
# |---|---|
# | rank0.json.gz ... | what ran on the rank and its device, for https://ui.perfetto.dev and chrome://tracing |
# | top.txt, top.json | own time of each operator and kernel over all ranks and profiled steps, the longest first |
#
# Imported only where the flag is given. Numbers of the run do not change; its speed in these steps does.

FOLDER = "profile"
SHOWN = 10
Given = TypeVar("Given")
_KINDS = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}


class Profiler:
    """Wraps the steps of a run's engine; ``finish`` writes what there is. On every rank, or on none."""

    def __init__(self, run: Run) -> None:
        self.run, self.steps = run, run.config.seeing.profiled()
        self._plain_step = run.engine.train_step
        self._profile: profile | None = None
        self._taken = self._next = 0
        run.engine.train_step = self.train_step  # type: ignore[method-assign]
        if run.progress.step >= self.steps[0] and run.world.rank == 0:
            log.warning(
                f"--profile {run.config.seeing.profile} begins ahead of step {run.progress.step + 1}, with which this "
                "run goes on: steps before it are not there. Steps are counted from the first start"
            )

    def train_step(self, data: DataIterator, step: int, num_micro_batches: int | None = None) -> StepResult:
        """Take the engine's step, within the profile where that is asked for. Collective."""
        if self._profile is not None and step != self._next:
            self._drop()  # the run has gone back
        if step + 1 not in self.steps:
            return self._plain_step(data, step, num_micro_batches)
        if self._profile is None:
            self._profile = self._start()
        with torch.profiler.record_function(f"step {step + 1}"):
            result = self._plain_step(data, step, num_micro_batches)
        self._taken, self._next = self._taken + 1, step + 1
        if step + 1 == self.steps[-1]:
            with self.run.phases.over(SAVING):
                self.finish()
        return result

    def finish(self) -> None:
        """End the profile, if it runs, and write it. Collective.

        A rank that cannot write says so; no run ends for a profile.
        """
        if self._profile is None:
            return
        taken, self._profile = self._profile, None
        folder, rank = self.run.folder / FOLDER, self.run.world.rank
        own = _tried(lambda: _ended(taken)) or []
        _tried(lambda: _write_trace(taken, folder / f"rank{rank}.json.gz"))
        every = self.run.world.grid.host.gather_objects(own)  # of no rank is it left out: the others wait for it
        operators = joined(every)
        if self.run.screen is None:
            return
        world_size = self.run.world.grid.topology.world_size
        _tried(lambda: _write_operators(folder, operators, self._taken, world_size))
        self.run.screen.line(table(operators[:SHOWN], self._taken, world_size, of=operators))
        self.run.screen.line(f"profile of {self._taken} steps: {folder}")

    def _start(self) -> profile:
        kind = self.run.world.kind
        activities = [ProfilerActivity.CPU, *([_KINDS[kind]] if kind in _KINDS else [])]
        made = profile(activities=activities)
        made.start()
        self._taken = 0
        return made

    def _drop(self) -> None:
        taken, self._profile = self._profile, None
        if taken is not None:
            _tried(taken.stop)


def _ended(taken: profile) -> list[Operator]:
    taken.stop()
    return operators_of(taken.key_averages())


def _write_trace(taken: profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    taken.export_chrome_trace(str(path))


def _write_operators(folder: Path, operators: list[Operator], steps: int, ranks: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files.replace_bytes(folder / "top.txt", table(operators, steps, ranks).encode() + b"\n")
    rows = {"steps": steps, "ranks": ranks, "operators": [each._asdict() for each in operators[:WRITTEN]]}
    files.replace_bytes(folder / "top.json", json.dumps(rows, indent=1).encode() + b"\n")


def _tried(do: Callable[[], Given]) -> Given | None:
    try:
        return do()
    except Exception as error:
        log.warning(f"the profile could not be taken or written ({type(error).__name__}: {error})")
        return None


# The picture that a run with --pipeline-trace leaves in its folder, instead of tds's own one. Rank 0 only.

TOOL = Path(__file__).resolve().parents[2] / "tools" / "draw_schedule.py"
PICTURE = "schedule.png"


def draw(trace: str, folder: Path, patience_s: float) -> str | None:
    """Draw the last traced step into ``folder``; return what to say of it, or None with a warning in the log.

    Args:
        trace: the folder that all ranks have written their traces to.
        patience_s: the other ranks wait meanwhile, and not for ever.
    """
    picture = folder / PICTURE
    command = [sys.executable, str(TOOL), "--trace", trace, "--out", str(picture)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        told = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        log.warning(f"no picture of the pipeline's trace in {trace}: {told[-1] if told else error}")
        return None
    plot.leave_picture(trace)
    bubble = next((" ".join(line.split()) for line in done.stdout.splitlines() if line.startswith("bubble")), "")
    return f"{picture}: {bubble}; {trace} is for Perfetto"

"""--profile: torch's profiler over some steps, a trace of each rank, and the operators that take longest over all.

| in RUN/profile | holds |
|---|---|
| rank0.json.gz ... | what ran on the rank and its device, for https://ui.perfetto.dev and chrome://tracing |
| top.txt, top.json | own time of each operator and kernel over all ranks and profiled steps, the longest first |

Imported only where the flag is given. Numbers of the run do not change; its speed in these steps does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from megatron import files, log
from megatron.training.engines import DataIterator
from megatron.training.operators import WRITTEN, Operator, joined, operators_of, table
from megatron.training.parts import Run
from megatron.training.phases import SAVING
from megatron.training.step_result import StepResult

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

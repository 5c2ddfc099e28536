"""Profiler: torch traces of all ranks and a table of the slowest operators (--profile)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from megatron import files, log
from megatron.training.step_result import StepResult
from megatron.training.timeouts import SAVING
from megatron.training.trainer import Callback

# Operators and kernels of a profile: their sums over ranks, and the table of the slowest ones.

MAX_WRITTEN = 40


class Operator(NamedTuple):
    """Self time of one operator or kernel, excluding the operators it calls, in microseconds."""

    name: str
    calls: int
    host_us: float
    device_us: float


def operators_of(averages: Iterable[Any]) -> list[Operator]:
    """Convert a profile's ``key_averages()`` to operators."""
    return [
        Operator(
            average.key, average.count, average.self_cpu_time_total, getattr(average, "self_device_time_total", 0.0)
        )
        for average in averages
        if not average.key.startswith(("step ", "ProfilerStep"))
    ]


def sum_over_ranks(operators_by_rank: Iterable[Iterable[Operator]]) -> list[Operator]:
    """Sum operators over ranks by name, slowest first (by device time if any, otherwise by host time)."""
    operator_sums: dict[str, Operator] = {}
    for name, calls, host_us, device_us in (
        operator for rank_operators in operators_by_rank for operator in rank_operators
    ):
        previous = operator_sums.get(name, Operator(name, 0, 0.0, 0.0))
        operator_sums[name] = Operator(
            name, previous.calls + calls, previous.host_us + host_us, previous.device_us + device_us
        )
    operators = list(operator_sums.values())
    has_device = any(operator.device_us for operator in operators)
    return sorted(
        operators, key=lambda operator: (-(operator.device_us if has_device else operator.host_us), operator.name)
    )


def format_table(
    shown: list[Operator], num_steps: int, num_ranks: int, all_operators: list[Operator] | None = None
) -> str:
    """Format operators as a table: self time in milliseconds per step and rank, share, and calls.

    Args:
        all_operators: all operators, if ``shown`` is a subset; shares are relative to them.
    """
    time_columns: list[tuple[str, Callable[[Operator], float]]] = [("host", lambda operator: operator.host_us)]
    if any(operator.device_us for operator in all_operators or shown):
        time_columns.insert(0, ("device", lambda operator: operator.device_us))
    num_runs = num_steps * num_ranks
    totals = [sum(map(time, all_operators or shown)) or 1.0 for _, time in time_columns]
    width = max((len(operator.name) for operator in shown[:MAX_WRITTEN]), default=8)
    head = "".join(f"{name + ' ms':>12} {'share':>7}" for name, _ in time_columns)
    lines = [f"{'operator':<{width}}{head} {'calls':>9}", ""]
    for operator in shown[:MAX_WRITTEN]:
        times = [(time(operator), total) for (_, time), total in zip(time_columns, totals, strict=True)]
        cells = "".join(f"{us / 1e3 / num_runs:>12.3f} {100 * us / total:>5.1f} %" for us, total in times)
        lines.append(f"{operator.name:<{width}}{cells} {operator.calls / num_runs:>9.1f}")
    lines[1] = "self time per step and rank, averaged over all steps and ranks"
    return "\n".join(lines)


# The callback: runs torch's profiler over some steps, and writes a trace of each rank and a table of the slowest
# operators.
#
# | file in RUN/profile | content |
# |---|---|
# | rank0.json.gz ... | trace of the rank and its device, for https://ui.perfetto.dev and chrome://tracing |
# | top.txt, top.json | self time of each operator and kernel over all ranks and profiled steps, slowest first |
#
# This module is imported only with --profile.

FOLDER = "profile"
MAX_SHOWN = 10
Result = TypeVar("Result")
_DEVICE_ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}


class Profiler(Callback):
    """Profiles the --profile steps. The run's results do not change, but these steps are slower."""

    def __init__(self, steps: range) -> None:
        self.steps = steps
        self._profile: profile | None = None
        self._step_range: Any = None
        self._num_steps = self._next_step = 0

    def on_train_start(self) -> None:
        trainer = self.trainer
        if trainer.progress.step >= self.steps[0] and trainer.world.rank == 0:
            log.warning(
                f"--profile {trainer.config.logging.profile} begins before step {trainer.progress.step + 1}, with "
                "which this run continues: earlier steps are not profiled. Steps are counted from the first start"
            )

    def on_step_start(self) -> None:
        step = self.trainer.samples.step
        if self._profile is not None and step != self._next_step:
            self._drop()  # the run has rolled back
        if step not in self.steps:
            return
        if self._profile is None:
            self._profile = self._start()
        self._step_range = torch.profiler.record_function(f"step {step}")
        self._step_range.__enter__()

    def on_after_update(self, result: StepResult) -> None:
        step = self.trainer.samples.step
        if step not in self.steps:
            return
        self._step_range.__exit__(None, None, None)
        self._num_steps, self._next_step = self._num_steps + 1, step + 1
        if step == self.steps[-1]:
            with self.trainer.phases.during(SAVING):
                self.finish()

    def on_train_end(self) -> None:
        self.finish()  # if the run stops within the profiled steps

    def finish(self) -> None:
        """Stop the profiler, if it is running, and write the results. Collective.

        Errors are logged as warnings; they do not end the run.
        """
        if self._profile is None:
            return
        profiler, self._profile = self._profile, None
        world = self.trainer.world
        folder, world_size = self.trainer.folder / FOLDER, world.grid.topology.world_size
        local_operators: list[Operator] = _try(lambda: _stop(profiler)) or []
        _try(lambda: _write_trace(profiler, folder / f"rank{world.rank}.json.gz"))
        # Every rank participates, even after an error.
        operators_of_ranks = world.grid.host.gather_objects(local_operators)
        operators = sum_over_ranks(operators_of_ranks)
        if world.rank != 0:
            return
        _try(lambda: _write_operators(folder, operators, self._num_steps, world_size))
        self.trainer.print_line(
            format_table(operators[:MAX_SHOWN], self._num_steps, world_size, all_operators=operators)
        )
        self.trainer.print_line(f"profile of {self._num_steps} steps: {folder}")

    def _start(self) -> profile:
        device_type = self.trainer.world.device_type
        activities = [
            ProfilerActivity.CPU,
            *([_DEVICE_ACTIVITIES[device_type]] if device_type in _DEVICE_ACTIVITIES else []),
        ]
        profiler = profile(activities=activities)
        profiler.start()
        self._num_steps = 0
        return profiler

    def _drop(self) -> None:
        """Stop the profiler and discard the results."""
        profiler, self._profile = self._profile, None
        if profiler is not None:
            _try(profiler.stop)


def _stop(profiler: profile) -> list[Operator]:
    profiler.stop()
    return operators_of(profiler.key_averages())


def _write_trace(profiler: profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def _write_operators(folder: Path, operators: list[Operator], num_steps: int, num_ranks: int) -> None:
    """Write top.txt and top.json."""
    folder.mkdir(parents=True, exist_ok=True)
    files.replace_bytes(folder / "top.txt", format_table(operators, num_steps, num_ranks).encode() + b"\n")
    rows = {
        "steps": num_steps,
        "ranks": num_ranks,
        "operators": [operator._asdict() for operator in operators[:MAX_WRITTEN]],
    }
    files.replace_bytes(folder / "top.json", json.dumps(rows, indent=1).encode() + b"\n")


def _try(function: Callable[[], Result]) -> Result | None:
    """Call ``function``; after an error, log a warning and return None."""
    try:
        return function()
    except Exception as error:
        log.warning(f"the profile could not be recorded or written ({type(error).__name__}: {error})")
        return None

"""A short training on random tokens, its estimate beside it, and ``plan.json``, from which estimates are made again.

Time and memory are measured in steps of their own, for counting slows a step down. Memory is counted, not read off
the process: the tensors that lie there ahead of a step, and the most that the step adds in torch's allocator
(``benchmarks.memory``). So it is the same in every run and on a busy machine, and means what the estimate means:
bytes of tensors, without Python, libraries, gloo's buffers and what an allocator keeps.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.memory import bytes_alive, measure
from benchmarks.plan_cases import CASES, Case
from megatron.arguments import parse, resolve_dtype
from megatron.config import Config
from megatron.models.common.memory import BYTES
from megatron.models.registry import FAMILIES
from megatron.planner.estimate import Estimate, Planner
from megatron.planner.layout import layout_of
from megatron.planner.machine import Link, Machine
from megatron.planner.spawn_ranks import Rank
from megatron.training import global_vars, initialize
from megatron.training.data import RunData
from megatron.training.parity import mock_tokenizer, random_data
from megatron.training.setup import build_engine, make_streams

COUNTED_AFTER = 2
"""Steps ahead of the one whose bytes are counted: then every state of the optimizer is there."""


@dataclass
class Measured:
    """What one rank found: its stage, seconds and processor seconds of each step, bytes."""

    stage: int
    steps_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    held_bytes: int = 0
    added_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most bytes of tensors that lay there at once in a step."""
        return self.held_bytes + self.added_bytes


def config_of(case: Case, *, is_smoke: bool = False) -> Config:
    """Return the configuration of a training, as the program of its family makes it from the flags."""
    program = program_of(case.family)
    config = parse(
        case.argv(is_smoke=is_smoke),
        world_size=case.ranks,
        family=case.family,
        env={},
        defaults=getattr(program, "DEFAULTS", None),
    )
    return resolve_dtype(config.with_vocab(config.model.vocab_size or 0), "fp32")


def program_of(family: str) -> Any:
    """Return the module of ``pretrain_<family>``."""
    return importlib.import_module(FAMILIES[family].program.removesuffix(".py").replace("/", "."))


def train_rank(rank: Rank, case: Case, is_smoke: bool, steps: int) -> Measured:
    """What each process of ``run_ranks`` does. Collective."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # engines are talkative
        return train(case, is_smoke, steps, rank.meet)


def train(case: Case, is_smoke: bool, steps: int, meet: Callable[[], None] = lambda: None) -> Measured:
    """Train this rank's part of ``case``. Collective.

    Args:
        steps: that are timed, after one ahead of them; 0: none, memory alone.
        meet: lets all ranks begin a step together.
    """
    nothing = bytes_alive()
    config = config_of(case, is_smoke=is_smoke)
    here, program = initialize.start(config), program_of(case.family)
    streams = make_streams(config, here)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, here, streams, program.model_provider, program.forward_step)
    data = RunData({"train": random_data(config)} if here.reads_data else {}, None)
    batches = data.batches("train", config, here)
    found, number = Measured(here.grid.pipe.rank), 0
    for _ in range(max(COUNTED_AFTER, 1 + steps if steps else 0)):
        meet()
        start, cpu_start = time.perf_counter(), time.process_time()
        engine.train_step(batches, number)
        found.steps_s.append(time.perf_counter() - start)
        found.cpu_s.append(time.process_time() - cpu_start)
        number += 1
    gc.collect()
    _wait_for_threads()
    found.held_bytes, found.added_bytes = measure(lambda: engine.train_step(batches, number))
    found.held_bytes -= nothing
    found.steps_s, found.cpu_s = ([], []) if not steps else (found.steps_s[1:], found.cpu_s[1:])
    return found


def _wait_for_threads(turns: int = 40, turn_s: float = 0.01) -> None:
    """Give the threads of gloo time to let go of the messages that they have sent, which outlive the wait for them.

    On a busy machine that may be long after; the time ends when a tenth of it has passed without a change.
    """
    least, quiet = bytes_alive(), 0
    for _ in range(turns):
        time.sleep(turn_s)
        now = bytes_alive()
        least, quiet = min(least, now), 0 if now != least else quiet + 1
        if quiet == turns // 10:
            return


TIME_BAR, MEMORY_BAR = 0.15, 0.10

UNTIMED = Machine(
    name="a CPU of which no rate is known",
    memory_bytes=2**34,
    devices_per_node=8,
    peak_flops=dict.fromkeys(BYTES, 1e11),
    product_flops=dict.fromkeys(BYTES, ((64.0, 1e11),)),
    memory_bandwidth=1e10,
    update_bandwidth=1e10,
    overhead_s=1e-5,
    intra=Link.of(1e9, 1e-4),
    inter=Link.of(1e9, 1e-4),
    is_cpu=True,
)
"""For memory, which depends on the machine by ``is_cpu`` alone."""


@dataclass(frozen=True)
class Row:
    """One case: estimate and measurement, of memory those of the rank that is farthest off; None: not timed."""

    name: str
    estimated_s: float
    measured_s: float | None
    estimated_bytes: int
    measured_bytes: int
    stage: int
    parts: dict[str, float]
    bubble: float

    @property
    def time_ratio(self) -> float | None:
        return None if self.measured_s is None else self.estimated_s / self.measured_s

    @property
    def memory_ratio(self) -> float:
        return self.estimated_bytes / self.measured_bytes

    @property
    def is_time_met(self) -> bool | None:
        return None if self.time_ratio is None else abs(self.time_ratio - 1) <= TIME_BAR

    @property
    def is_memory_met(self) -> bool:
        return abs(self.memory_ratio - 1) <= MEMORY_BAR

    @property
    def is_met(self) -> bool:
        return self.is_memory_met and self.is_time_met is not False

    def __str__(self) -> str:
        time = "" if self.time_ratio is None else f"step time {self.time_ratio:.3f}, "
        return f"{self.name}: {time}memory {self.memory_ratio:.3f} of what was measured"

    def as_data(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        names = ("time_ratio", "memory_ratio", "is_time_met", "is_memory_met")
        return asdict(self) | {name: getattr(self, name) for name in names}


def estimate_of(case: Case, machine: Machine = UNTIMED, *, is_smoke: bool = False) -> Estimate:
    """Return what the planner says of ``case``."""
    config = config_of(case, is_smoke=is_smoke)
    return Planner(config, machine).estimate(layout_of(config, case.ranks))


def row_of(case: Case, estimate: Estimate, ranks: Sequence[Measured], *, by_cpu_time: bool = False) -> Row:
    """Return estimate and measurement of one case.

    A step lasts as long as its slowest rank takes; the median over the steps counts.
    """
    series = [each.cpu_s if by_cpu_time else each.steps_s for each in ranks]
    slowest = [max(step) for step in zip(*series, strict=True)]
    worst = max(ranks, key=lambda each: abs(estimate.memory[each.stage].total / each.peak_bytes - 1))
    return Row(
        name=case.name,
        estimated_s=estimate.step_s,
        measured_s=statistics.median(slowest) if slowest else None,
        estimated_bytes=estimate.memory[worst.stage].total,
        measured_bytes=worst.peak_bytes,
        stage=worst.stage,
        parts=dict(estimate.parts),
        bubble=estimate.bubble,
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, the farthest from measurement last, and what is not met."""
    lines = [f"{'':44}{'ms a step':>20}{'':8}{'MiB of the worst rank':>26}", f"{'layout':44}{_HEAD}{_HEAD}"]
    for row in rows:
        step = _pair(row.estimated_s * 1e3, _ms(row), row.time_ratio, row.is_time_met)
        size = _pair(row.estimated_bytes / 2**20, row.measured_bytes / 2**20, row.memory_ratio, row.is_memory_met)
        lines.append(f"{row.name:44}{step}{size}".rstrip())
    timed = [row for row in rows if row.time_ratio is not None]
    if timed:
        lines.append(_summary("step time", [row.time_ratio or 0.0 for row in timed], TIME_BAR))
    lines.append(_summary("memory", [row.memory_ratio for row in rows], MEMORY_BAR))
    return "\n".join(lines)


_HEAD = f"{'estimate':>11}{'measured':>11}{'ratio':>8}{'':5}"


def _ms(row: Row) -> float | None:
    return None if row.measured_s is None else row.measured_s * 1e3


def _pair(estimated: float, measured: float | None, ratio: float | None, is_met: bool | None) -> str:
    if measured is None or ratio is None:
        return f"{'-':>11}{'-':>11}{'-':>8}{'':5}"
    return f"{estimated:11.1f}{measured:11.1f}{ratio:8.3f}{'' if is_met else ' FAR':5}"


def _summary(what: str, ratios: Sequence[float], bar: float) -> str:
    far = sum(abs(ratio - 1) > bar for ratio in ratios)
    verdict = "met" if not far else f"NOT met by {far} of {len(ratios)}"
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    return f"{what}: within {bar:.0%} of measurement: {verdict}; worst ratio {worst:.3f}"


def recorded(rows: Sequence[Row], machines: Mapping[int, Machine], *, is_smoke: bool) -> dict[str, Any]:
    """Return what ``rows_now`` needs, for JSON; of the machines all but their notes, which name a host."""
    told = {str(ranks): json.loads(replace(machine, notes="").to_json()) for ranks, machine in machines.items()}
    return {"is_smoke": is_smoke, "machines": told, "rows": [row.as_data() for row in rows]}


def rows_now(recording: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of ``recording``: what was measured then beside what the planner says now.

    So a change of the planner can be held against measurements of an idle machine without one.

    Raises:
        KeyError: a layout is none of ``CASES``.
        ConfigError: a machine cannot be read.
    """
    cases = {case.name: case for case in CASES}
    machines = {
        int(ranks): Machine.from_json(json.dumps(told), f"a recording of {ranks} ranks")
        for ranks, told in recording["machines"].items()
    }
    for told in recording["rows"]:
        case = cases[told["name"]]
        estimate = estimate_of(case, machines.get(case.ranks, UNTIMED), is_smoke=recording["is_smoke"])
        yield Row(
            name=case.name,
            estimated_s=estimate.step_s,
            measured_s=told["measured_s"],
            estimated_bytes=estimate.memory[told["stage"]].total,
            measured_bytes=told["measured_bytes"],
            stage=told["stage"],
            parts=dict(estimate.parts),
            bubble=estimate.bubble,
        )

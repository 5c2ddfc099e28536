"""Compare what the planner estimates with what short trainings measure, on CPU layouts of 1, 2 and 4 ranks.

    python benchmarks/plan.py --out runs/plan               # everything; wants an idle machine, about 8 minutes
    python benchmarks/plan.py --memory-only                 # bytes alone, which a busy machine does not change
    python benchmarks/plan.py --only "gpt2 1 rank" --cpu-time

For each number of ranks the machine is calibrated anew with so many at once, then each layout trains a few steps in
processes of its own. Step time must be within 15 % of the estimate, memory within 10 % on every rank. With --cpu-time
both sides count processor time, in one thread: that says something of the formulas on a busy machine, for layouts of
one rank.

The machine's speed changes while the benchmark runs. So a reference is timed ahead of each step and behind it, and the
step counts at the speed that the machine had while it was calibrated (``megatron.planner.reference``). Of the steps
those count beside which the reference was fastest, the better half.

Time and memory are measured in steps of their own, for counting slows a step down. Memory is counted, not read off
the process: the tensors that lie there ahead of a step, and the most that the step adds in torch's allocator
(``benchmarks.step_profile``). So it is the same in every run and on a busy machine, and means what the estimate means:
bytes of tensors, without Python, libraries, gloo's buffers and what an allocator keeps.

DIR gets table.txt, plan.json and the machines as machine-N.json. plan.json holds the machines, too: from it alone the
estimates can be made again (``rows_now``).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler that counts memory is talkative
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
from benchmarks.step_profile import bytes_alive, measure
from benchmarks.turns import surroundings
from megatron.arguments import parse, resolve_dtype
from megatron.config import Config
from megatron.costs.memory import BYTES
from megatron.models.registry import FAMILIES
from megatron.planner.calibrate import calibrate
from megatron.planner.estimate import Estimate, Planner
from megatron.planner.layout import layout_of
from megatron.planner.machine import Link, Machine
from megatron.planner.microbenchmarks import TimingBudget
from megatron.planner.reference import Reference, busy_s, longest_wait, waits
from megatron.planner.spawn_ranks import Rank, run_ranks
from megatron.training import global_vars, initialize
from megatron.training.data import RunData
from megatron.training.mock_data import mock_tokenizer, random_data
from megatron.training.setup import build_engine, make_streams

# The layouts whose estimates are compared with measurement: small models that two CPU cores train in seconds.

COMMON = "--batch-size 4 --gas 4 --attention-dropout 0 --hidden-dropout 0 --data-path none --device cpu --lr 1e-4"
SIZES = {
    "gpt2": "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --vocab-size 8192 --seq-length 256 "
    "--max-position-embeddings 256 --hidden-bias --activation gelu-tanh",
    "t5": "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --vocab-size 8192 --enc-seq-length 256",
    "llama": "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --vocab-size 8192 --seq-length 256",
    "mpt": "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --vocab-size 8192 --seq-length 256",
    "bert": "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --vocab-size 8192 --seq-length 256",
}
"""Family -> the sizes that are timed. Of these a step of four micro-batches takes about a second."""
SMOKE = {
    family: "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 "
    + ("--enc-seq-length 64" if family == "t5" else "--seq-length 64")
    + (" --max-position-embeddings 64 --hidden-bias" if family == "gpt2" else "")
    for family in SIZES
}
"""The same for tests, and for whether the benchmark runs at all."""


@dataclass(frozen=True)
class Case:
    """One training: a family, how many ranks, and the flags of its layout."""

    family: str
    ranks: int = 1
    flags: str = ""

    @property
    def name(self) -> str:
        words = [word.removeprefix("--") for word in self.flags.split()]
        return " ".join([self.family, f"{self.ranks} rank{'s' if self.ranks > 1 else ''}", *words])

    def argv(self, *, is_smoke: bool = False) -> list[str]:
        """Return the command line of its program."""
        sizes = (SMOKE if is_smoke else SIZES)[self.family]
        common = COMMON.replace("--hidden-dropout 0 ", "") if self.family == "llama" else COMMON
        return f"{sizes} {common} {self.flags}".split()


TENSOR, PIPE = "--model-parallel-size 2", "--pipe-parallel-size 2"
RECOMPUTE = "--checkpoint-activations"
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 128 --moe-aux-loss-coeff 0.01"
SHARED_OUT = f"{EXPERTS} --expert-model-parallel-size 2"
CASES = (
    Case("gpt2"),
    Case("gpt2", 1, RECOMPUTE),
    Case("gpt2", 1, "--bf16"),
    Case("gpt2", 2, TENSOR),
    Case("gpt2", 2, f"{TENSOR} --sequence-parallel"),
    Case("gpt2", 2, PIPE),
    Case("gpt2", 2, f"{PIPE} {RECOMPUTE}"),
    Case("gpt2", 2, f"{PIPE} --pipeline-schedule zb-h1"),
    Case("gpt2", 2, f"{PIPE} --pipeline-chunks 2"),
    Case("gpt2", 2),
    Case("gpt2", 2, "--zero-stage 1"),
    Case("gpt2", 4, f"{TENSOR} {PIPE}"),
    Case("gpt2", 4, PIPE),
    Case("t5"),
    Case("t5", 1, RECOMPUTE),
    Case("t5", 2, TENSOR),
    Case("t5", 2, PIPE),
    Case("t5", 2),
    Case("t5", 4, f"{TENSOR} {PIPE}"),
    Case("llama"),
    Case("mpt"),
    Case("bert"),
)
EXPERT_CASES = (
    Case("llama", 1, EXPERTS),
    Case("llama", 1, f"{EXPERTS} --bf16"),
    Case("llama", 1, f"{EXPERTS} {RECOMPUTE}"),
    Case("llama", 2, f"{EXPERTS} --zero-stage 1"),
    Case("llama", 2, f"{EXPERTS} {TENSOR}"),
    Case("llama", 2, f"{EXPERTS} {PIPE}"),
    Case("llama", 2, SHARED_OUT),
    Case("llama", 2, f"{SHARED_OUT} --bf16 --zero-stage 1"),
    Case("llama", 4, f"{SHARED_OUT} --zero-stage 1"),
    Case("llama", 4, f"{SHARED_OUT} {PIPE}"),
    Case("llama", 4, f"{SHARED_OUT} {TENSOR} --sequence-parallel"),
)
"""Of these memory alone is compared, with --memory-only: no step of layers with experts has been timed."""


COUNTED_AFTER = 2
"""Steps ahead of the one whose bytes are counted: then every state of the optimizer is there."""


@dataclass
class Measured:
    """What one rank found: its stage, seconds and processor seconds of each step, bytes.

    Args:
        reference_s: beside each step, the same on all ranks; none: not read.
        busy_s: seconds of all cores, by whatever program, during each step.
        waited_s: the most that a thread stood in the run queue during each step.
    """

    stage: int
    steps_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    held_bytes: int = 0
    added_bytes: int = 0
    reference_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)

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


def train_rank(rank: Rank, case: Case, is_smoke: bool, steps: int, by_cpu_time: bool = False) -> Measured:
    """What each process of ``run_ranks`` does. Collective.

    Args:
        steps: that are timed, after one ahead of them; 0: none, memory alone.
    """
    pace = TimingBudget(by_cpu_time=by_cpu_time).shared_by(rank.size, rank.threads)
    reference = Reference(rank, pace.now, LOOKS) if steps else None
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # engines are talkative
        return train(case, is_smoke, steps, rank.meet, reference)


def train(
    case: Case,
    is_smoke: bool,
    steps: int,
    meet: Callable[[], None] = lambda: None,
    reference: Reference | None = None,
) -> Measured:
    """Train this rank's part of ``case``. Collective.

    Args:
        meet: lets all ranks begin a step together.
        reference: read ahead of each step and behind it.
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
        waited, busy = waits(), busy_s()
        start, cpu_start = time.perf_counter(), time.process_time()
        engine.train_step(batches, number)
        found.steps_s.append(time.perf_counter() - start)
        found.cpu_s.append(time.process_time() - cpu_start)
        found.waited_s.append(longest_wait(waited))
        meet()
        found.busy_s.append(busy_s() - busy)
        if reference is not None:
            found.reference_s.append(reference.beside())
        number += 1
    gc.collect()
    _wait_for_threads()
    found.held_bytes, found.added_bytes = measure(lambda: engine.train_step(batches, number))
    found.held_bytes -= nothing
    for name in ("steps_s", "cpu_s", "reference_s", "busy_s", "waited_s"):
        setattr(found, name, getattr(found, name)[1:] if steps else [])
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
LOOKS = 7
"""At the reference, of which the median counts, ahead of a step and behind it."""

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
    """One case: estimate and measurement, of memory those of the rank that is farthest off; None: not timed.

    Args:
        measured_s: without what other programs took, at the speed of the machine's calibration.
        speed: of the machine beside the steps that count, over that of its calibration.
        others: cores that other programs took in the steps that count.
        steps: each of them as ``Step``.
    """

    name: str
    estimated_s: float
    measured_s: float | None
    estimated_bytes: int
    measured_bytes: int
    stage: int
    parts: dict[str, float]
    bubble: float
    speed: float = 1.0
    others: float = 0.0
    steps: list[dict[str, float]] = field(default_factory=list)

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


@dataclass(frozen=True)
class Step:
    """One step of all ranks.

    Args:
        seconds: of the slowest rank.
        lost_s: of these, to other programs.
        others: cores that other programs had meanwhile; 0 where it was not counted.
        reference_s: beside it; 0: not read.
    """

    seconds: float
    lost_s: float
    others: float
    reference_s: float

    def speed(self, calibrated_s: float) -> float:
        """Return how many times as fast the machine was as one whose reference takes so long; 1 if unknown."""
        return calibrated_s / self.reference_s if calibrated_s and self.reference_s else 1.0


def steps_of(ranks: Sequence[Measured], cores: int, *, by_cpu_time: bool = False) -> list[Step]:
    """Return what the ranks found of each step.

    What a thread stood in the run queue is lost to other programs as far as these were at work. Where ranks share
    cores, so that they stand there for one another, other programs' work is what all of them lose together.
    """
    found = []
    for n in range(len(ranks[0].steps_s)):
        wall_s = max(each.steps_s[n] for each in ranks)
        others_s = max(0.0, ranks[0].busy_s[n] - sum(each.cpu_s[n] for each in ranks))
        waited = max(each.waited_s[n] for each in ranks)
        lost_s = others_s / cores if len(ranks) > cores else min(others_s, waited)
        seconds = max(each.cpu_s[n] for each in ranks) if by_cpu_time else wall_s
        beside = ranks[0].reference_s[n] if ranks[0].reference_s else 0.0
        found.append(Step(seconds, 0.0 if by_cpu_time else lost_s, others_s / wall_s, beside))
    return found


def row_of(
    case: Case,
    estimate: Estimate,
    ranks: Sequence[Measured],
    *,
    by_cpu_time: bool = False,
    calibrated_s: float = 0.0,
) -> Row:
    """Return estimate and measurement of one case.

    Each step is taken without what it lost to other programs, and at the speed of the calibration, by the reference
    beside it. Of the better half, in which the machine was fastest by that reference, the median counts: ranks that
    wait for one another lose more to a slow moment than a reference does.

    Args:
        calibrated_s: the reference of the machine that ``estimate`` is of; 0: nothing is scaled.
    """
    steps = steps_of(ranks, len(os.sched_getaffinity(0)), by_cpu_time=by_cpu_time)
    quiet = sorted(steps, key=lambda step: (step.reference_s, step.others))[: (len(steps) + 1) // 2]
    if not any(step.others or step.reference_s for step in steps):
        quiet = steps
    known = [(step.seconds - step.lost_s) * step.speed(calibrated_s) for step in quiet]
    worst = max(ranks, key=lambda each: abs(estimate.memory[each.stage].total / each.peak_bytes - 1))
    return Row(
        name=case.name,
        estimated_s=estimate.step_s,
        measured_s=statistics.median(known) if known else None,
        estimated_bytes=estimate.memory[worst.stage].total,
        measured_bytes=worst.peak_bytes,
        stage=worst.stage,
        parts=dict(estimate.parts),
        bubble=estimate.bubble,
        speed=statistics.median(step.speed(calibrated_s) for step in quiet) if quiet else 1.0,
        others=statistics.median(step.others for step in quiet) if quiet else 0.0,
        steps=[asdict(step) for step in steps],
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, and how many are within each bar."""
    width = max(len("layout"), *(len(row.name) for row in rows))
    lines = [
        f"{'':{width}}{'ms a step':>22}{'':13}{'MiB of the worst rank':>29}".rstrip(),
        f"{'layout':{width}}{_HEAD}{_HEAD}   speed  others",
    ]
    for row in rows:
        step = _pair(row.estimated_s * 1e3, _ms(row), row.time_ratio, row.is_time_met)
        size = _pair(row.estimated_bytes / 2**20, row.measured_bytes / 2**20, row.memory_ratio, row.is_memory_met)
        beside = "" if row.time_ratio is None else f"{row.speed:8.2f}{row.others:8.2f}"
        lines.append(f"{row.name:{width}}{step}{size}{beside}".rstrip())
    timed = [row for row in rows if row.time_ratio is not None]
    if timed:
        lines.append("speed: beside the steps, over that of the calibration; others: cores that other programs had")
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
    near = sum(abs(ratio - 1) <= bar for ratio in ratios)
    verdict = "met" if near == len(ratios) else "NOT met"
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    return (
        f"{what}: {near} of {len(ratios)} layouts within {bar:.0%} of measurement: {verdict}; worst ratio {worst:.3f}"
    )


def recorded(rows: Sequence[Row], machines: Mapping[int, Machine], *, is_smoke: bool) -> dict[str, Any]:
    """Return what ``rows_now`` needs, for JSON; of the machines all but their notes, which name a host."""
    told = {str(ranks): json.loads(replace(machine, notes="").to_json()) for ranks, machine in machines.items()}
    return {"is_smoke": is_smoke, "machines": told, "rows": [row.as_data() for row in rows]}


def rows_now(recording: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of ``recording``: what was measured then beside what the planner says now.

    So a change of the planner can be held against measurements of an idle machine without one.

    Raises:
        KeyError: a layout is none of ``CASES`` and ``EXPERT_CASES``.
        ConfigError: a machine cannot be read.
    """
    cases = {case.name: case for case in (*CASES, *EXPERT_CASES)}
    machines = {
        int(ranks): Machine.from_json(json.dumps(told), f"a recording of {ranks} ranks")
        for ranks, told in recording["machines"].items()
    }
    for told in recording["rows"]:
        case = cases[told["name"]]
        kept = {name: told[name] for name in ("speed", "others", "steps") if name in told}
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
            **kept,
        )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the benchmark's options."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed, after one ahead (default: 5)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="layouts whose names hold one of these texts")
    parser.add_argument("--memory-only", action="store_true", help="count bytes; calibrate and time nothing")
    parser.add_argument("--cpu-time", action="store_true", help="processor time in one thread; layouts of one rank")
    parser.add_argument("--smoke", action="store_true", help="models of no use, a few steps: whether it runs at all")
    parser.add_argument("--strict", action="store_true", help="end with code 1 if a bar is not met")
    parser.add_argument("--list", action="store_true", help="name the layouts and end")
    parser.add_argument("--out", type=Path, default=Path("runs/plan"), metavar="DIR", help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    if args.memory_only and args.cpu_time:
        parser.error("--memory-only times nothing, so --cpu-time would do nothing: give one of the two")
    return args


def chosen(args: argparse.Namespace) -> list[Case]:
    """Return the layouts that the options ask for.

    Raises:
        SystemExit: none has such a name.
    """
    known = (*CASES, *EXPERT_CASES) if args.memory_only else CASES
    cases = [case for case in known if not args.only or any(text in case.name for text in args.only)]
    if args.cpu_time:
        cases = [case for case in cases if case.ranks == 1]
    if not cases:
        raise SystemExit(f"--only must name a layout{' of one rank' * args.cpu_time}, got {args.only}; see --list")
    return cases


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train the layouts, print and write the table."""
    args = parse_args(argv)
    cases = chosen(args)
    if args.list:
        print("\n".join(case.name for case in cases))
        return {}

    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    machines: dict[int, Machine] = {}
    for case in sorted(cases, key=lambda case: case.ranks):
        if not args.memory_only and case.ranks not in machines:  # right ahead of its layouts
            machines[case.ranks] = machine_of(case.ranks, args)
        rows.append(compare(case, machines.get(case.ranks), args))
        _log(f"{len(rows)} of {len(cases)}: {rows[-1]}")
    text = table(rows)
    print(text)
    result = {"surroundings": surroundings(), "load": os.getloadavg()}
    result |= recorded(rows, machines, is_smoke=args.smoke)
    (args.out / "table.txt").write_text(text + "\n")
    (args.out / "plan.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {args.out}/table.txt, plan.json")
    if args.strict and not all(row.is_met for row in rows):
        raise SystemExit("layouts beyond a bar: " + ", ".join(row.name for row in rows if not row.is_met))
    return result


def machine_of(ranks: int, args: argparse.Namespace) -> Machine:
    """Return this machine as so many ranks at once find it; write it down."""
    pace = TimingBudget(by_cpu_time=args.cpu_time)
    if args.smoke:
        small = {"largest_side": 512, "numbers": 2**16, "widest": 128}
        pace = TimingBudget(window_s=0.01, windows=1, turns=1, by_cpu_time=args.cpu_time, **small)
    threads = 1 if args.cpu_time else None
    found = calibrate(ranks, "cpu", report=_log, pace=pace, round_s=pace.window_s, threads=threads)
    found.save(args.out / f"machine-{ranks}.json")
    return found


def compare(case: Case, machine: Machine | None, args: argparse.Namespace) -> Row:
    """Train one layout; return its row. ``machine`` None: without time."""
    steps = 0 if machine is None else min(args.steps, 2) if args.smoke else args.steps
    threads = 1 if args.cpu_time else None
    ranks = run_ranks(case.ranks, train_rank, case, args.smoke, steps, args.cpu_time, threads=threads, deadline_s=600.0)
    machine = machine or UNTIMED
    estimate = estimate_of(case, machine, is_smoke=args.smoke)
    return row_of(case, estimate, ranks, by_cpu_time=args.cpu_time, calibrated_s=machine.reference_s)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""Compare the planner's estimates with short training runs on 1, 2 and 4 CPU ranks.

    python benchmarks/plan.py --out runs/plan               # every layout, about 8 minutes on an idle machine
    python benchmarks/plan.py --memory-only                 # memory only, which does not depend on the load
    python benchmarks/plan.py --only "gpt2 1 rank"

For each number of ranks the benchmark calibrates the machine, then trains each layout for a few steps in separate
processes. The step time must be within 15 % of the estimate and the memory within 10 % on every rank.

The speed of a shared machine changes during the run. A reference computation (``megatron.planner.reference``) is timed
before and after each step, and each step time is scaled to the machine's speed during calibration.

Memory is counted in a separate step: the bytes of live tensors before the step plus the peak that the step adds in
torch's allocator (``benchmarks.step_profile``).

table.txt, plan.json and machine-N.json are written to DIR. ``recompute_rows`` recomputes the estimates from plan.json.
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
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # silence the memory profiler
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
from benchmarks.step_profile import live_bytes, measure_memory
from benchmarks.turns import measurement_info
from megatron.arguments import parse, resolve_dtype
from megatron.config import Config
from megatron.costs.memory import BYTES
from megatron.models.registry import FAMILIES
from megatron.planner.calibrate import calibrate
from megatron.planner.estimate import Estimate, Planner
from megatron.planner.layout import layout_of
from megatron.planner.machine import Link, Machine
from megatron.planner.microbenchmarks import TimingBudget
from megatron.planner.reference import Reference
from megatron.planner.spawn_ranks import Rank, run_ranks
from megatron.training import global_vars, initialize
from megatron.training.data import RunData
from megatron.training.mock_data import mock_tokenizer, random_data
from megatron.training.setup import build_engine, make_streams

# Layouts compared with measurements: small models that train in seconds on two CPU cores.

COMMON = "--batch-size 4 --gas 4 --attention-dropout 0 --hidden-dropout 0 --data-path none --device cpu --lr 1e-4"
SIZES = {
    "gpt2": "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --vocab-size 8192 --seq-length 256 "
    "--max-position-embeddings 256 --hidden-bias --activation gelu-tanh",
    "t5": "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --vocab-size 8192 --enc-seq-length 256",
    "llama": "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --vocab-size 8192 --seq-length 256",
    "mpt": "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --vocab-size 8192 --seq-length 256",
    "bert": "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --vocab-size 8192 --seq-length 256",
}
"""Family -> flags of the timed models. A step of four micro-batches takes about a second."""
SMOKE = {
    family: "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 "
    + ("--enc-seq-length 64" if family == "t5" else "--seq-length 64")
    + (" --max-position-embeddings 64 --hidden-bias" if family == "gpt2" else "")
    for family in SIZES
}
"""Family -> flags of the models in smoke tests."""


@dataclass(frozen=True)
class Case:
    """One training run: a model family, a number of ranks and the flags of the layout."""

    family: str
    num_ranks: int = 1
    flags: str = ""

    @property
    def name(self) -> str:
        words = [word.removeprefix("--") for word in self.flags.split()]
        return " ".join([self.family, f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}", *words])

    def argv(self, *, is_smoke: bool = False) -> list[str]:
        """Return the command line of the training script."""
        size_flags = (SMOKE if is_smoke else SIZES)[self.family]
        common = COMMON.replace("--hidden-dropout 0 ", "") if self.family == "llama" else COMMON
        return f"{size_flags} {common} {self.flags}".split()


TENSOR, PIPE = "--model-parallel-size 2", "--pipe-parallel-size 2"
RECOMPUTE = "--checkpoint-activations"
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 128 --moe-aux-loss-coeff 0.01"
EXPERT_PARALLEL = f"{EXPERTS} --expert-model-parallel-size 2"
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
    Case("llama", 2, EXPERT_PARALLEL),
    Case("llama", 2, f"{EXPERT_PARALLEL} --bf16 --zero-stage 1"),
    Case("llama", 4, f"{EXPERT_PARALLEL} --zero-stage 1"),
    Case("llama", 4, f"{EXPERT_PARALLEL} {PIPE}"),
    Case("llama", 4, f"{EXPERT_PARALLEL} {TENSOR} --sequence-parallel"),
)
"""Cases that run only with --memory-only: the step times of layers with experts have not been measured."""


TIME_BAR, MEMORY_BAR = 0.15, 0.10
NUM_REFERENCE_READINGS = 7
"""Number of readings of the reference before and after a step, whose median is used."""
STEPS_BEFORE_COUNT = 2
"""Number of steps before memory is counted, so that the optimizer states exist."""

PLACEHOLDER_MACHINE = Machine(
    name="a CPU with unknown rates",
    memory_bytes=2**34,
    devices_per_node=8,
    peak_flops=dict.fromkeys(BYTES, 1e11),
    product_flops=dict.fromkeys(BYTES, ((64.0, 1e11),)),
    memory_bandwidth=1e10,
    update_bandwidth=1e10,
    overhead_s=1e-5,
    intra=Link.uniform(1e9, 1e-4),
    inter=Link.uniform(1e9, 1e-4),
    is_cpu=True,
)
"""Machine for memory estimates, which depend on ``is_cpu`` only."""


@dataclass
class RankMeasurement:
    """Measurements of one rank.

    Args:
        steps_s: seconds of each timed step.
        reference_s: seconds of the reference computation around each step, equal on all ranks; empty if not measured.
        live_bytes: bytes of the tensors that are alive before a step.
        added_bytes: peak of the bytes that the step adds.
    """

    stage: int
    steps_s: list[float] = field(default_factory=list)
    reference_s: list[float] = field(default_factory=list)
    live_bytes: int = 0
    added_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return self.live_bytes + self.added_bytes


def make_config(case: Case, *, is_smoke: bool = False) -> Config:
    """Return the configuration that the training script of the family builds from the flags."""
    config = parse(
        case.argv(is_smoke=is_smoke),
        world_size=case.num_ranks,
        family=case.family,
        env={},
        defaults=getattr(load_program(case.family), "DEFAULTS", None),
    )
    return resolve_dtype(config.with_vocab(config.model.vocab_size or 0), "fp32")


def load_program(family: str) -> Any:
    """Return the module ``pretrain_<family>``."""
    return importlib.import_module(FAMILIES[family].program.removesuffix(".py").replace("/", "."))


def make_estimate(case: Case, machine: Machine = PLACEHOLDER_MACHINE, *, is_smoke: bool = False) -> Estimate:
    """Return the planner's estimate for a case on ``machine``."""
    config = make_config(case, is_smoke=is_smoke)
    return Planner(config, machine).estimate(layout_of(config, case.num_ranks))


def train_rank(rank: Rank, case: Case, is_smoke: bool, steps: int) -> RankMeasurement:
    """Train in one process of ``run_ranks``. Collective.

    Args:
        steps: timed steps after one warm-up step; 0: count memory only.
    """
    budget = TimingBudget().shared_by(rank.size, rank.threads)
    reference = Reference(rank, budget.now, NUM_REFERENCE_READINGS) if steps else None
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):  # silence the engines
        return train(case, is_smoke, steps, rank.barrier, reference)


def train(
    case: Case,
    is_smoke: bool,
    steps: int,
    barrier: Callable[[], None] = lambda: None,
    reference: Reference | None = None,
) -> RankMeasurement:
    """Train this rank's part of ``case``. Collective.

    Args:
        barrier: barrier before each step.
        reference: timed before and after each step.
    """
    bytes_before = live_bytes()
    config = make_config(case, is_smoke=is_smoke)
    world, program = initialize.start(config), load_program(case.family)
    streams = make_streams(config, world)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, world, streams, program.model_provider, program.forward_step)
    data = RunData({"train": random_data(config)} if world.reads_data else {}, None)
    batches = data.batches("train", config, world)
    measured = RankMeasurement(world.grid.pipe.rank)
    num_steps = max(STEPS_BEFORE_COUNT, 1 + steps if steps else 0)
    for step in range(num_steps):
        barrier()
        start = time.perf_counter()
        engine.train_step(batches, step)
        seconds = time.perf_counter() - start
        barrier()
        reference_s = [] if reference is None else [reference.read_mean()]
        if steps and step:  # the first step warms up
            measured.steps_s.append(seconds)
            measured.reference_s += reference_s
    gc.collect()
    _wait_for_threads()
    measured.live_bytes, measured.added_bytes = measure_memory(lambda: engine.train_step(batches, num_steps))
    measured.live_bytes -= bytes_before
    return measured


def _wait_for_threads(turns: int = 40, turn_s: float = 0.01) -> None:
    """Wait until gloo's threads have released the buffers of sent messages, at most ``turns * turn_s`` seconds."""
    least, quiet_turns = live_bytes(), 0
    for _ in range(turns):
        time.sleep(turn_s)
        now = live_bytes()
        least, quiet_turns = min(least, now), 0 if now != least else quiet_turns + 1
        if quiet_turns == turns // 10:
            return


@dataclass(frozen=True)
class Row:
    """Estimate and measurement of one case; memory is that of the rank with the largest relative error.

    Args:
        measured_s: median step time, scaled to the machine's speed during calibration; None if not timed.
    """

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

    def as_data(self) -> dict[str, Any]:
        """Return all values for JSON."""
        names = ("time_ratio", "memory_ratio", "is_time_met", "is_memory_met")
        return asdict(self) | {name: getattr(self, name) for name in names}


def make_row(case: Case, estimate: Estimate, measurements: Sequence[RankMeasurement], calibrated_s: float = 0.0) -> Row:
    """Compare the estimate of one case with the measurements of all ranks.

    Args:
        calibrated_s: seconds of the reference computation during calibration; 0 to use step times without scaling.
    """
    steps = []
    for step in range(len(measurements[0].steps_s)):
        reference_s = measurements[0].reference_s[step] if measurements[0].reference_s else 0.0
        speed = calibrated_s / reference_s if calibrated_s and reference_s else 1.0
        steps.append(max(measurement.steps_s[step] for measurement in measurements) * speed)
    worst = max(
        measurements, key=lambda measurement: abs(estimate.memory[measurement.stage].total / measurement.peak_bytes - 1)
    )
    return Row(
        name=case.name,
        estimated_s=estimate.step_s,
        measured_s=statistics.median(steps) if steps else None,
        estimated_bytes=estimate.memory[worst.stage].total,
        measured_bytes=worst.peak_bytes,
        stage=worst.stage,
        parts=dict(estimate.seconds_by_activity),
        bubble=estimate.bubble,
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, with the number of rows within the allowed errors of time and memory."""

    def format_cells(estimated: float, measured: float | None, ratio: float | None, is_met: bool | None) -> str:
        if measured is None or ratio is None:
            return f"{'-':>11}{'-':>11}{'-':>8}{'':5}"
        return f"{estimated:11.1f}{measured:11.1f}{ratio:8.3f}{'' if is_met else ' FAR':5}"

    width = max(len("layout"), *(len(row.name) for row in rows))
    columns = f"{'estimate':>11}{'measured':>11}{'ratio':>8}{'':5}"
    lines = [
        f"{'':{width}}{'ms per step':>22}{'':13}{'MiB of the worst rank':>29}".rstrip(),
        f"{'layout':{width}}{columns}{columns}".rstrip(),
    ]
    for row in rows:
        measured_ms = None if row.measured_s is None else row.measured_s * 1e3
        step = format_cells(row.estimated_s * 1e3, measured_ms, row.time_ratio, row.is_time_met)
        memory = format_cells(
            row.estimated_bytes / 2**20, row.measured_bytes / 2**20, row.memory_ratio, row.is_memory_met
        )
        lines.append(f"{row.name:{width}}{step}{memory}".rstrip())
    time_ratios = [row.time_ratio for row in rows if row.time_ratio is not None]
    memory_ratios = [row.memory_ratio for row in rows]
    for title, ratios, bar in (("step time", time_ratios, TIME_BAR), ("memory", memory_ratios, MEMORY_BAR)):
        if ratios:
            num_met = sum(abs(ratio - 1) <= bar for ratio in ratios)
            verdict = "met" if num_met == len(ratios) else "NOT met"
            worst = max(ratios, key=lambda ratio: abs(ratio - 1))
            within = f"{num_met} of {len(ratios)} layouts within {bar:.0%} of measurement"
            lines.append(f"{title}: {within}: {verdict}; worst ratio {worst:.3f}")
    return "\n".join(lines)


def to_recording(rows: Sequence[Row], machines: Mapping[int, Machine], *, is_smoke: bool) -> dict[str, Any]:
    """Return the measurements and machines for plan.json, without the machines' notes, which contain a host name."""
    by_ranks = {str(ranks): json.loads(replace(machine, notes="").to_json()) for ranks, machine in machines.items()}
    return {"is_smoke": is_smoke, "machines": by_ranks, "rows": [row.as_data() for row in rows]}


def recompute_rows(recording: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of a recording: its measurements with the planner's current estimates.

    Raises:
        KeyError: a layout is not in ``CASES`` or ``EXPERT_CASES``.
        ConfigError: a machine is invalid.
    """
    cases = {case.name: case for case in (*CASES, *EXPERT_CASES)}
    machines = {
        int(ranks): Machine.from_json(json.dumps(values), f"a recording of {ranks} ranks")
        for ranks, values in recording["machines"].items()
    }
    for values in recording["rows"]:
        case = cases[values["name"]]
        estimate = make_estimate(
            case, machines.get(case.num_ranks, PLACEHOLDER_MACHINE), is_smoke=recording["is_smoke"]
        )
        yield Row(
            name=case.name,
            estimated_s=estimate.step_s,
            measured_s=values["measured_s"],
            estimated_bytes=estimate.memory[values["stage"]].total,
            measured_bytes=values["measured_bytes"],
            stage=values["stage"],
            parts=dict(estimate.seconds_by_activity),
            bubble=estimate.bubble,
        )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps after one warm-up step (default: 5)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="layouts whose names contain one of these texts")
    parser.add_argument("--memory-only", action="store_true", help="count memory; calibrate and time nothing")
    parser.add_argument("--smoke", action="store_true", help="tiny models and few steps, to test the benchmark")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a bar is not met")
    parser.add_argument("--list", action="store_true", help="print the names of the layouts and exit")
    parser.add_argument("--out", type=Path, default=Path("runs/plan"), metavar="DIR", help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    return args


def select_cases(args: argparse.Namespace) -> list[Case]:
    """Return the layouts selected by the options.

    Raises:
        SystemExit: no layout matches.
    """
    known = (*CASES, *EXPERT_CASES) if args.memory_only else CASES
    cases = [case for case in known if not args.only or any(text in case.name for text in args.only)]
    if not cases:
        raise SystemExit(f"--only must name a layout, got {args.only}; see --list")
    return cases


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train the layouts; print and write the table."""
    args = parse_args(argv)
    cases = select_cases(args)
    if args.list:
        print("\n".join(case.name for case in cases))
        return {}
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    machines: dict[int, Machine] = {}
    for case in sorted(cases, key=lambda case: case.num_ranks):
        if not args.memory_only and case.num_ranks not in machines:  # calibrate right before the layouts are timed
            machines[case.num_ranks] = calibrate_machine(case.num_ranks, args)
        rows.append(compare(case, machines.get(case.num_ranks), args))
        _log(f"{len(rows)} of {len(cases)}: {table(rows[-1:]).splitlines()[2]}")
    text = table(rows)
    print(text)
    result = {"surroundings": measurement_info(), "load": os.getloadavg()}
    result |= to_recording(rows, machines, is_smoke=args.smoke)
    (args.out / "table.txt").write_text(text + "\n")
    (args.out / "plan.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {args.out}/table.txt, plan.json")
    if args.strict and not all(row.is_met for row in rows):
        raise SystemExit("layouts outside a bar: " + ", ".join(row.name for row in rows if not row.is_met))
    return result


def calibrate_machine(num_ranks: int, args: argparse.Namespace) -> Machine:
    """Calibrate this machine with ``num_ranks`` processes at once, and save the result."""
    budget = TimingBudget()
    if args.smoke:
        budget = TimingBudget(
            window_s=0.01, windows=1, num_repetitions=1, max_side=512, num_elements=2**16, max_hidden_size=128
        )
    machine = calibrate(num_ranks, "cpu", report=_log, timing_budget=budget, round_s=budget.window_s)
    machine.save(args.out / f"machine-{num_ranks}.json")
    return machine


def compare(case: Case, machine: Machine | None, args: argparse.Namespace) -> Row:
    """Train one layout and return its row; without a machine nothing is timed."""
    steps = 0 if machine is None else min(args.steps, 2) if args.smoke else args.steps
    measurements = run_ranks(case.num_ranks, train_rank, case, args.smoke, steps, deadline_s=600.0)
    machine = machine or PLACEHOLDER_MACHINE
    return make_row(case, make_estimate(case, machine, is_smoke=args.smoke), measurements, machine.reference_s)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

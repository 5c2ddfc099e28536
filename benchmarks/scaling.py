"""How training scales: measured on this machine's ranks, and predicted for 8 to 4,096 devices.

    python benchmarks/scaling.py --predict-only               # seconds; measures nothing
    python benchmarks/scaling.py --ranks 2                    # wants an idle machine, about 4 minutes
    python benchmarks/scaling.py --predict-only --gpu a100-80g --schedule zb-h1 --out runs/scaling

Measured: one rank, then every layout of 2 (and 4) ranks, each rank with one thread; strong (the samples of a step
stay) and weak (they grow with the ranks); beside the efficiency that the planner expects with the calibrated machine.
Predicted: a GPT of 7 billion parameters; every number of stages and replicas, by the pipeline's simulator, the
planner's times of pieces and messages. Tables and pictures go into docs/scaling.md, or a copy of it in --out DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
from benchmarks.plan import PIPE, TENSOR, Case, estimate_of, train_rank
from benchmarks.turns import surroundings
from megatron.arguments import parse
from megatron.planner.calibrate import calibrate
from megatron.planner.estimate import Planner
from megatron.planner.layout import Layout
from megatron.planner.machine import SHEETS, Machine, device
from megatron.planner.microbenchmarks import TimingBudget
from megatron.planner.spawn_ranks import run_ranks
from tds.schedule import Costs, schedule_named, simulate

# Predicted: the schedule is run by the simulator, messages and update are the planner's.
#
# A GPT of 7 billion parameters on p stages, each stage ``tensor`` devices wide, with d replicas. The seconds of each
# piece's forward and backward are the planner's, its sums over tensor ranks in them; ``tds.schedule.simulate`` runs the
# actions of all stages with the time of a message between stages, which gives the bubble and the waits for messages.
# Sums over replicas beyond the last backward, and the update, follow.
#
# | series | what stays | what falls |
# |---|---|---|
# | strong | samples of a step | micro-batches of a replica: the bubble grows |
# | weak | micro-batches of a replica | nothing: what is lost is lost to messages |

MODEL = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 51200 --seq-length 2048 "
    "--max-position-embeddings 2048 --hidden-bias --batch-size 1 --gas 1 --attention-dropout 0 --hidden-dropout 0 "
    "--data-path none --bf16"
)
STRONG_SAMPLES, WEAK_MICRO_BATCHES = 1024, 64
STAGES = (1, 2, 4, 8, 16, 32)
DEVICES = tuple(2**power for power in range(3, 13))
TERMS = ("compute", "tensor", "bubble", "messages", "sums", "update")
"""What the seconds of a step are spent on: products and passes, sums over tensor ranks, waits for other stages without
and with the time of messages, sums over replicas that nothing hides, the optimizer."""


@dataclass(frozen=True)
class Prediction:
    """One layout; ``seconds`` of a step by term, ``closed_s`` the planner's own step with the bubble's closed form.

    Args:
        fits: in the memory of a device.
        ideal_s: if all devices only computed, on equal shares.
    """

    series: str
    stages: int
    replicas: int
    tensor: int
    schedule: str
    micro_batches: int
    seconds: dict[str, float]
    closed_s: float
    ideal_s: float
    tokens: int
    fits: bool
    mfu: float

    @property
    def devices(self) -> int:
        return self.stages * self.replicas * self.tensor

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def efficiency(self) -> float:
        """The share of a step in which an average device computes."""
        return self.ideal_s / self.step_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    def share(self, term: str) -> float:
        """Return the share of a step that ``term`` takes."""
        return self.seconds[term] / self.step_s


def predictions(
    machine: Any, *, tensor: int = 1, schedule: str = "1f1b", devices: Sequence[int] = DEVICES, flags: str = MODEL
) -> list[Prediction]:
    """Return both series on every number of devices, for all stages that can be."""

    config = parse(flags.split(), world_size=1, env={})
    config = config.with_vocab(config.model.vocab_size or 0)
    planner = Planner(config, machine)
    found = []
    for total in devices:
        for stages in STAGES:
            replicas, rest = divmod(total, stages * tensor)
            if rest or not replicas or stages > config.model.num_layers:
                continue
            layout = Layout(
                tensor=tensor, pipe=stages, data=replicas, schedule=schedule, dtype=config.precision.dtype or "bf16"
            )
            for series, number in (("strong", STRONG_SAMPLES / replicas), ("weak", WEAK_MICRO_BATCHES)):
                if number >= 1 and number == int(number):
                    found.append(predict_step(planner, replace(layout, num_micro_batches=int(number)), series))
    return found


def predict_step(planner: Any, layout: Any, series: str) -> Prediction:
    """Return what the simulator and the planner say of one layout of one chunk."""
    estimate = planner.estimate(layout)
    m, p = layout.num_micro_batches, layout.pipe
    pieces = _pieces(planner, layout, estimate)
    message_s = estimate.traffic["pipeline"].seconds / (2 * m) if p > 1 else 0.0
    silent_s, whole_s = (_simulated(pieces, layout.schedule, m, transfer) for transfer in (0.0, message_s))
    tensor_s = m * _tensor_s(estimate, layout)
    busy_s = m * sum(map(sum, pieces)) / p
    seconds = {
        "compute": busy_s - tensor_s,
        "tensor": tensor_s,
        "bubble": silent_s - busy_s,
        "messages": whole_s - silent_s,
        "sums": estimate.parts["data"],
        "update": estimate.parts["update"],
    }
    step_s = sum(seconds.values())
    return Prediction(
        series=series,
        stages=p,
        replicas=layout.data,
        tensor=layout.tensor,
        schedule=layout.schedule,
        micro_batches=m,
        seconds=seconds,
        closed_s=estimate.step_s,
        ideal_s=busy_s - tensor_s,
        tokens=estimate.tokens,
        fits=estimate.most_bytes <= planner.machine.usable_bytes,
        mfu=estimate.flops / step_s / estimate.peak_flops,
    )


def best(found: Sequence[Prediction], series: str, devices: int) -> Prediction | None:
    """Return the fastest that fits of one series on so many devices."""
    fitting = [one for one in found if one.series == series and one.devices == devices and one.fits]
    return max(fitting, key=lambda one: one.tokens_per_s, default=None)


def table(found: Sequence[Prediction]) -> str:
    """Return the fastest layout that fits, of each series and every third number of devices, in Markdown."""
    lines = [
        "| series | devices | stages x replicas | micro-batches | s a step | tokens/s | compute | bubble | messages "
        "between stages | sums over replicas | update | MFU | closed form / simulated |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for series in ("strong", "weak"):
        for devices in sorted({one.devices for one in found})[::3]:
            one = best(found, series, devices)
            if one is None:
                lines.append(f"| {series} | {devices:,} | none fits |" + " |" * 10)
                continue
            shares = [one.share("compute") + one.share("tensor"), *map(one.share, TERMS[2:]), one.mfu]
            lines.append(
                f"| {series} | {devices:,} | {one.stages} x {one.replicas:,} | {one.micro_batches} | "
                f"{one.step_s:.2f} | {one.tokens_per_s:,.0f} | {' | '.join(f'{share:.1%}' for share in shares)} | "
                f"{one.closed_s / one.step_s:.3f} |"
            )
    return "\n".join(lines)


def _pieces(planner: Any, layout: Any, estimate: Any) -> tuple[tuple[float, float, float], ...]:
    """Return the seconds of each piece: forward, backward for the input, for the weights; tensor sums shared out."""
    units, sums = planner.units(layout), _tensor_s(estimate, layout)
    found = []
    for start, stop in zip(estimate.bounds, estimate.bounds[1:], strict=False):
        own = units[start:stop]
        forward = sum(unit.forward for unit in own) + sums / 2
        backward = sum(unit.backward for unit in own) + sums / 2
        found.append((forward, backward / 2, backward / 2))
    return tuple(found)


def _tensor_s(estimate: Any, layout: Any) -> float:
    """Return the seconds that a stage, on average, waits for sums over tensor ranks in a micro-batch."""
    return float(estimate.parts["tensor"]) / layout.num_micro_batches


@cache
def _simulated(pieces: tuple[tuple[float, float, float], ...], schedule: str, m: int, transfer_s: float) -> float:
    """Return how long the actions of a step last."""

    forward, of_input, of_weights = (tuple(column) for column in zip(*pieces, strict=True))
    actions = schedule_named(schedule)
    stages = [actions(len(pieces), m, stage) for stage in range(len(pieces))]
    return float(simulate(stages, Costs(forward, of_input, of_weights, transfer=transfer_s)).step_s)


# Strong and weak scaling on this machine: the same small GPT-2 on 1, 2 and 4 ranks, each with one thread.
#
# Strong: the samples of a step stay the same. Weak: each rank has as many as the one rank had; with stages and tensor
# ranks, which share the work of a sample, more samples in a step stand for that.
#
# The efficiency of n ranks is tokens/s over n times those of one rank; n counts at most as many as there are cores, for
# ranks beyond them only share. Beside it stands what the estimate with the calibrated machine gives for the same ratio,
# and the bubble by the closed form.

SAMPLES, MICRO_BATCH = 32, 4


@dataclass(frozen=True)
class Point:
    """One layout of one of the two series: ``samples`` of a step, in micro-batches of ``MICRO_BATCH``."""

    series: str
    ranks: int
    flags: str
    replicas: int
    samples: int

    @property
    def case(self) -> Case:
        """The training: of the last flag of a name the last one counts."""
        number = self.samples // (self.replicas * MICRO_BATCH)
        return Case("gpt2", self.ranks, f"{self.flags} --batch-size {MICRO_BATCH} --gas {number}".strip())

    @property
    def name(self) -> str:
        tensor = 2 if TENSOR in self.flags else 1
        pipe = 2 if PIPE in self.flags else 1
        return f"tensor {tensor}, stages {pipe}, replicas {self.replicas}"


def points(most: int) -> list[Point]:
    """Return the layouts of both series on up to ``most`` ranks; the first is one rank."""
    layouts = [(1, "", 1), (2, TENSOR, 1), (2, PIPE, 1), (2, "", 2)]
    layouts += [(4, f"{TENSOR} {PIPE}", 1), (4, PIPE, 2), (4, TENSOR, 2), (4, "", 4)]
    found = [Point("strong", *layout, SAMPLES) for layout in layouts if layout[0] <= most]
    return found + [Point("weak", *layout, SAMPLES * layout[0]) for layout in layouts if 1 < layout[0] <= most]


@dataclass(frozen=True)
class Scaled:
    """A point as measured and as estimated; ``cores`` of the machine."""

    point: Point
    step_s: float
    estimated_s: float
    bubble: float
    tokens: int
    cores: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    def efficiency(self, one: Scaled) -> float:
        """Return the share of what so many times the one rank would do."""
        return self.tokens_per_s / one.tokens_per_s / min(self.point.ranks, self.cores)

    def expected(self, one: Scaled) -> float:
        """Return the same of the estimates."""
        speeds = [each.tokens / each.estimated_s for each in (self, one)]
        return speeds[0] / speeds[1] / min(self.point.ranks, self.cores)

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def train_point(point: Point, machine: Any, steps: int, cores: int, *, is_smoke: bool = False) -> Scaled:
    """Train ``point`` with one thread in each rank and return what a step took."""

    ranks = run_ranks(point.ranks, train_rank, point.case, is_smoke, steps, threads=1, deadline_s=600.0)
    slowest = [max(step) for step in zip(*(each.steps_s for each in ranks), strict=True)]
    estimate = estimate_of(point.case, machine, is_smoke=is_smoke)
    return Scaled(point, statistics.median(slowest), estimate.step_s, estimate.bubble, estimate.tokens, cores)


def measured_table(rows: Sequence[Scaled]) -> str:
    """Return the rows in Markdown; the first is that of one rank."""
    one = rows[0]
    lines = [
        "| series | ranks | layout | samples | ms a step | tokens/s | efficiency | by the estimate | bubble |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        point = row.point
        lines.append(
            f"| {point.series} | {point.ranks} | {point.name} | {point.samples} | {row.step_s * 1e3:.0f} | "
            f"{row.tokens_per_s:,.0f} | {row.efficiency(one):.2f} | {row.expected(one):.2f} | {row.bubble:.1%} |"
        )
    return "\n".join(lines)


# Pictures: efficiency over devices by stages, where the time goes, and what was measured.

COLOURS = ("#4878a8", "#79a8c8", "#e0b050", "#c87050", "#a05080", "#808080")
SERIES = {"strong": "strong scaling: samples of a step stay", "weak": "weak scaling: micro-batches of a replica stay"}


def draw_predicted(found: Sequence[Prediction], title: str, path: Path) -> None:
    """Draw, for both series, the efficiency of each number of stages and the terms of the fastest layout."""
    figure, axes = _axes(2, 2, (11.0, 7.0))
    for column, (series, told) in enumerate(SERIES.items()):
        _draw_efficiency(axes[0][column], [one for one in found if one.series == series])
        axes[0][column].set_title(told)
        _draw_terms(axes[1][column], found, series)
    axes[0][0].set_ylabel("share of a step spent on computing")
    axes[1][0].set_ylabel("the fastest that fits: shares of a step")
    axes[0][0].legend(title="stages", fontsize=8)
    axes[1][1].legend(fontsize=8, loc="center right")
    figure.suptitle(title)
    _save(figure, path)


def draw_measured(rows: Sequence[Scaled], title: str, path: Path) -> None:
    """Draw the measured efficiency of each layout beside that of its estimate."""
    figure, ((axis,),) = _axes(1, 1, (10.0, 4.5))
    places, one = range(len(rows) - 1), rows[0]
    axis.bar([x - 0.2 for x in places], [row.efficiency(one) for row in rows[1:]], 0.4, label="measured",
             color=COLOURS[0])  # fmt: skip
    axis.bar([x + 0.2 for x in places], [row.expected(one) for row in rows[1:]], 0.4, label="by the estimate",
             color=COLOURS[2])  # fmt: skip
    names = [f"{row.point.series}, {row.point.ranks} ranks\n" + row.point.name.replace(", ", "\n") for row in rows[1:]]
    axis.set_xticks(list(places), names, fontsize=7)
    axis.axhline(1.0, color="black", linewidth=0.5)
    axis.set_ylabel("tokens/s over that of one rank, by core")
    axis.legend(fontsize=8)
    axis.set_title(title)
    _save(figure, path)


def _draw_efficiency(axis: Any, found: Sequence[Prediction]) -> None:
    for stages, colour in zip(sorted({one.stages for one in found}), (*COLOURS, "black"), strict=False):
        own = [one for one in found if one.stages == stages]
        axis.plot([one.devices for one in own], [one.efficiency for one in own], color=colour, linewidth=1, alpha=0.6)
        for fits, style in ((True, "o"), (False, "x")):
            some = [one for one in own if one.fits == fits]
            label = str(stages) + ("" if any(one.fits for one in own) else " (does not fit)") if some else None
            axis.plot([one.devices for one in some], [one.efficiency for one in some], style, color=colour,
                      markersize=4, label=label)  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted({one.devices for one in found}))
    axis.set_xticklabels([f"{devices}" for devices in sorted({one.devices for one in found})], fontsize=8)
    axis.set_ylim(0, 1.02)
    axis.grid(alpha=0.3)


def _draw_terms(axis: Any, found: Sequence[Prediction], series: str) -> None:
    numbers = sorted({one.devices for one in found})
    fastest = [(devices, best(found, series, devices)) for devices in numbers]
    own = [(str(devices), one) for devices, one in fastest if one is not None]
    below = [0.0] * len(own)
    for term, colour in zip(TERMS, COLOURS, strict=True):
        shares = [one.share(term) for _, one in own]
        if max(shares, default=0.0) > 0:
            axis.bar([name for name, _ in own], shares, bottom=below, color=colour, label=term, width=0.7)
        below = [lower + share for lower, share in zip(below, shares, strict=True)]
    for place, (_, one) in enumerate(own):
        axis.text(place, 0.03, f"{one.stages} x {one.replicas}", rotation=90, ha="center", fontsize=7, color="white")
    axis.set_xlabel("devices; in the bars stages x replicas")
    axis.set_ylim(0, 1.02)


def _axes(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


# The sections of docs/scaling.md that are written here, between marks; the rest of the page is written by hand.


def replaced(text: str, name: str, section: str) -> str:
    """Return ``text`` with what lies between the marks of ``name`` replaced by ``section``.

    Raises:
        ValueError: the marks are not there once each, in their order.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the page must have {begin} and then {end} once each. Put them where the section belongs")
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n\n{section.strip()}\n\n{end}{tail}"


def update(page: Path, name: str, section: str) -> None:
    """Write ``section`` into the page.

    Raises:
        ValueError: as ``replaced``.
    """
    page.write_text(replaced(page.read_text(encoding="utf-8"), name, section), encoding="utf-8")


PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
SCHEDULES = ("1f1b", "gpipe", "zb-h1")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the benchmark's options."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--predict-only", action="store_true", help="measure nothing: the prediction alone")
    parser.add_argument("--ranks", type=int, help="measure up to so many ranks: 2 or 4 (default: the cores, at most 4)")
    parser.add_argument("--steps", type=int, help="steps that are timed, after one ahead (default: 5)")
    parser.add_argument("--smoke", action="store_true", help="models of no use, with --out: whether it runs at all")
    parser.add_argument("--gpu", choices=tuple(SHEETS), help="predict for nodes of these (default: h100-80g)")
    parser.add_argument("--machine", type=Path, metavar="FILE", help="or for what tools/plan.py --calibrate wrote")
    parser.add_argument("--tensor", type=int, default=1, help="tensor ranks of each stage predicted (default: 1)")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of the prediction (default: 1f1b)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write page and pictures here (default: docs/)")
    args = parser.parse_args(argv)
    problems = list(_problems(args))
    if problems:
        parser.error("; ".join(problems))
    args.steps = args.steps or 5
    args.ranks = args.ranks or max(2, min(4, len(os.sched_getaffinity(0))))
    return args


def _problems(args: argparse.Namespace) -> list[str]:
    found = []
    if args.ranks not in (None, 2, 4):
        found.append(f"--ranks must be 2 or 4, got {args.ranks}")
    if args.steps is not None and args.steps < 1:
        found.append(f"--steps must be at least 1, got {args.steps}")
    if args.tensor < 1:
        found.append(f"--tensor must be at least 1, got {args.tensor}")
    if args.gpu and args.machine:
        found.append("--gpu and --machine each name the machine: give one of the two")
    idle = [f"--{name}" for name in ("ranks", "steps", "smoke") if getattr(args, name)]
    if args.predict_only and idle:
        found.append(
            f"--predict-only measures nothing, so {', '.join(idle)} would do nothing: leave out one or the other"
        )
    if args.smoke and not args.out:
        found.append(f"--smoke measures nothing of use, and would write it into {PAGE.name}: give --out DIR too")
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, predict, and write tables and pictures."""
    args = parse_args(argv)
    page = PAGE
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        page = Path(shutil.copy(PAGE, args.out / PAGE.name))
    result = {"predicted": predict(args, page)}
    if not args.predict_only:
        result["measured"] = measure(args, page)
    print(f"written: {page}, {page.parent / 'pictures'}/scaling_*.png")
    return result


def predict(args: argparse.Namespace, page: Path) -> list[dict[str, Any]]:
    """Predict both series; write table and picture."""

    began = time.monotonic()
    machine = Machine.load(args.machine) if args.machine else device(args.gpu or "h100-80g")
    found = predictions(machine, tensor=args.tensor, schedule=args.schedule)
    if not found:
        raise SystemExit(f"--tensor {args.tensor} leaves no layout on {DEVICES[-1]:,} devices; use less")
    title = f"GPT 7B, s 2048, bf16, {machine.name}, {args.schedule}, tensor {args.tensor}"
    draw_predicted(found, title, page.parent / "pictures" / "scaling_predicted.png")
    text = table(found)
    print(title, text, sep="\n")
    update(page, "predicted", f"{title}.\n\n{text}\n\n![predicted efficiency](pictures/scaling_predicted.png)")
    print(f"{len(found)} layouts in {time.monotonic() - began:.1f} s", file=sys.stderr)
    return [{**vars(one), "step_s": one.step_s, "devices": one.devices} for one in found]


def measure(args: argparse.Namespace, page: Path) -> list[dict[str, Any]]:
    """Train every layout; write table and picture."""

    layouts, cores, load = points(args.ranks), len(os.sched_getaffinity(0)), os.getloadavg()[0]
    machines = {ranks: _calibrated(ranks, args.smoke) for ranks in sorted({point.ranks for point in layouts})}
    rows = []
    for number, point in enumerate(layouts, 1):
        rows.append(train_point(point, machines[point.ranks], args.steps, cores, is_smoke=args.smoke))
        _log(f"{number} of {len(layouts)}: {point.series}, {point.name}: {rows[-1].step_s * 1e3:.0f} ms a step")
    here = surroundings()
    title = f"{here['processor']}, {cores} cores, load {load:.1f} before it, {time.strftime('%Y-%m-%d')}"
    draw_measured(rows, title, page.parent / "pictures" / "scaling_measured.png")
    text = measured_table(rows)
    print(title, text, sep="\n")
    told = f"{title}: `{here['command']}`.\n\n{text}\n\n![measured efficiency](pictures/scaling_measured.png)"
    update(page, "measured", told)
    result = [row.as_data() for row in rows]
    if args.out:
        (args.out / "measured.json").write_text(json.dumps({"surroundings": here, "rows": result}, indent=1) + "\n")
    return result


def _calibrated(ranks: int, is_smoke: bool) -> Any:

    pace = (
        TimingBudget(window_s=0.01, windows=1, largest_side=256, numbers=2**16, turns=1, widest=128)
        if is_smoke
        else TimingBudget()
    )
    return calibrate(ranks, "cpu", report=_log, pace=pace, round_s=pace.window_s, threads=1)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

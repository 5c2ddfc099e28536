"""What a step would take on 8 to 4,096 devices, and what it takes on this machine's ranks.

Predicted: the schedule is run by the simulator, messages and update are the planner's.

A GPT of 7 billion parameters on p stages, each stage ``tensor`` devices wide, with d replicas. The seconds of each
piece's forward and backward are the planner's, its sums over tensor ranks in them; ``tds.schedule.simulate`` runs the
actions of all stages with the time of a message between stages, which gives the bubble and the waits for messages.
Sums over replicas beyond the last backward, and the update, follow.

| series | what stays | what falls |
|---|---|---|
| strong | samples of a step | micro-batches of a replica: the bubble grows |
| weak | micro-batches of a replica | nothing: what is lost is lost to messages |
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from benchmarks.plan_cases import PIPE, TENSOR, Case

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
    from megatron.arguments import parse
    from megatron.planner.estimate import Planner
    from megatron.planner.layout import Layout

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
                    found.append(predict(planner, replace(layout, num_micro_batches=int(number)), series))
    return found


def predict(planner: Any, layout: Any, series: str) -> Prediction:
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
    from tds.schedule import Costs, schedule_named, simulate

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


def measure(point: Point, machine: Any, steps: int, cores: int, *, is_smoke: bool = False) -> Scaled:
    """Train ``point`` with one thread in each rank and return what a step took."""
    from benchmarks.plan_training import estimate_of, train_rank
    from megatron.planner.spawn_ranks import run_ranks

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

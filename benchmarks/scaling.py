"""Predict how the training of a GPT with 7 billion parameters scales to 8 to 4,096 devices.

    python benchmarks/scaling.py --out runs/scaling
    python benchmarks/scaling.py --gpu a100-80g --schedule zb-h1 --out runs/scaling

For every number of stages and replicas the benchmark runs the schedule in the simulator, with the planner's times of
layers and messages, in two series: strong scaling (the samples of a step stay the same) and weak scaling (the
micro-batches of a replica stay the same). It writes the table into docs/scaling.md, or into a copy of it in --out DIR.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
from megatron.arguments import parse
from megatron.planner.estimate import Planner
from megatron.planner.layout import Layout
from megatron.planner.machine import DATA_SHEETS, Machine, gpu_machine
from tds.schedule import Costs, schedule_named, simulate

# A GPT of 7 billion parameters on p stages of ``tensor`` devices each, with d replicas. The planner gives the seconds
# of each chunk's forward and backward, including all-reduces over tensor ranks. ``tds.schedule.simulate`` runs the
# actions of all stages with the time of a message between stages, which gives the bubble and the waits for messages.
# The update is added, and the part of the all-reduces over replicas that does not overlap with the last backward.
#
# | series | constant | decreasing |
# |---|---|---|
# | strong | samples of a step | micro-batches of a replica, so that the bubble grows |
# | weak | micro-batches of a replica | nothing: only messages reduce the efficiency |

MODEL = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 51200 --seq-length 2048 "
    "--max-position-embeddings 2048 --hidden-bias --batch-size 1 --gas 1 --attention-dropout 0 --hidden-dropout 0 "
    "--data-path none --bf16"
)
STRONG_SAMPLES, WEAK_MICRO_BATCHES = 1024, 64
STAGES = (1, 2, 4, 8, 16, 32)
DEVICES = tuple(2**power for power in range(3, 13))
TERMS = ("compute", "tensor", "bubble", "messages", "sums", "update")
"""Components of the step time, in this order:

* compute: matrix products and memory-bound operations
* tensor: all-reduces over tensor ranks
* bubble: waits for other stages if messages took no time
* messages: additional waits because messages take time
* sums: all-reduces over replicas that do not overlap with the backward pass
* update: the optimizer
"""


@dataclass(frozen=True)
class Prediction:
    """Predicted step of one layout.

    Args:
        series: "strong" or "weak".
        seconds: component of ``TERMS`` -> seconds, from the simulation.
        planner_s: the planner's step time in seconds, without a simulation.
        tokens: tokens of a step.
        fits: the layout fits in the memory of a device.
    """

    series: str
    num_stages: int
    num_replicas: int
    tensor: int
    schedule: str
    num_micro_batches: int
    seconds: dict[str, float]
    planner_s: float
    tokens: int
    fits: bool
    mfu: float

    @property
    def num_devices(self) -> int:
        return self.num_stages * self.num_replicas * self.tensor

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    def share(self, term: str) -> float:
        """Return the share of ``term`` in a step."""
        return self.seconds[term] / self.step_s


def predict(
    machine: Any, *, tensor: int = 1, schedule: str = "1f1b", device_counts: Sequence[int] = DEVICES, flags: str = MODEL
) -> list[Prediction]:
    """Return the predictions of both series for every number of devices and every possible number of stages."""

    config = parse(flags.split(), world_size=1, env={})
    config = config.with_vocab(config.model.vocab_size or 0)
    planner = Planner(config, machine)
    results = []
    for num_devices in device_counts:
        for num_stages in STAGES:
            num_replicas, remainder = divmod(num_devices, num_stages * tensor)
            if remainder or not num_replicas or num_stages > config.model.num_layers:
                continue
            layout = Layout(
                tensor=tensor,
                pipe=num_stages,
                data=num_replicas,
                schedule=schedule,
                dtype=config.precision.dtype or "bf16",
            )
            for series, num_micro_batches in (("strong", STRONG_SAMPLES / num_replicas), ("weak", WEAK_MICRO_BATCHES)):
                if num_micro_batches >= 1 and num_micro_batches == int(num_micro_batches):
                    results.append(
                        predict_step(planner, replace(layout, num_micro_batches=int(num_micro_batches)), series)
                    )
    return results


def predict_step(planner: Any, layout: Any, series: str) -> Prediction:
    """Return the prediction for a layout with one chunk per stage."""
    estimate = planner.estimate(layout)
    m, p = layout.num_micro_batches, layout.pipe
    # wait_s is the time of the all-reduces over tensor ranks, per micro-batch.
    units, tensor_wait_s = planner.unit_seconds(layout), float(estimate.seconds_by_activity["tensor"]) / m
    chunk_times = tuple(
        (forward, backward / 2, backward / 2)
        for start, stop in itertools.pairwise(estimate.bounds)
        for forward in [sum(unit.forward for unit in units[start:stop]) + tensor_wait_s / 2]
        for backward in [sum(unit.backward for unit in units[start:stop]) + tensor_wait_s / 2]
    )
    message_s = estimate.traffic["pipeline"].seconds / (2 * m) if p > 1 else 0.0
    no_message_s, step_with_messages_s = (
        _simulate_step(chunk_times, layout.schedule, m, transfer) for transfer in (0.0, message_s)
    )
    tensor_s = m * tensor_wait_s
    busy_s = m * sum(map(sum, chunk_times)) / p
    seconds = {
        "compute": busy_s - tensor_s,
        "tensor": tensor_s,
        "bubble": no_message_s - busy_s,
        "messages": step_with_messages_s - no_message_s,
        "sums": estimate.seconds_by_activity["data"],
        "update": estimate.seconds_by_activity["update"],
    }
    step_s = sum(seconds.values())
    return Prediction(
        series=series,
        num_stages=p,
        num_replicas=layout.data,
        tensor=layout.tensor,
        schedule=layout.schedule,
        num_micro_batches=m,
        seconds=seconds,
        planner_s=estimate.step_s,
        tokens=estimate.tokens,
        fits=estimate.max_bytes <= planner.machine.usable_bytes,
        mfu=estimate.flops / step_s / estimate.peak_flops,
    )


def fastest_layout(candidates: Sequence[Prediction], series: str, num_devices: int) -> Prediction | None:
    """Return the fastest layout of a series on ``num_devices`` devices that fits in memory."""
    fitting = [
        prediction
        for prediction in candidates
        if prediction.series == series and prediction.num_devices == num_devices and prediction.fits
    ]
    return max(fitting, key=lambda prediction: prediction.tokens_per_s, default=None)


def table(predictions: Sequence[Prediction]) -> str:
    """Return the fastest layout that fits, for each series and every third number of devices, in Markdown."""
    lines = [
        "| series | devices | stages x replicas | micro-batches | s per step | tokens/s | compute | bubble | messages "
        "between stages | all-reduces over replicas | update | MFU | closed form / simulated |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for series in ("strong", "weak"):
        for num_devices in sorted({row.num_devices for row in predictions})[::3]:
            row = fastest_layout(predictions, series, num_devices)
            if row is None:
                lines.append(f"| {series} | {num_devices:,} | none fits |" + " |" * 10)
                continue
            shares = [
                row.share("compute") + row.share("tensor"),
                *map(row.share, TERMS[2:]),
                row.mfu,
            ]
            lines.append(
                f"| {series} | {num_devices:,} | {row.num_stages} x {row.num_replicas:,} | {row.num_micro_batches} | "
                f"{row.step_s:.2f} | {row.tokens_per_s:,.0f} | {' | '.join(f'{share:.1%}' for share in shares)} | "
                f"{row.planner_s / row.step_s:.3f} |"
            )
    return "\n".join(lines)


@cache
def _simulate_step(
    chunk_times: tuple[tuple[float, float, float], ...], schedule: str, m: int, transfer_s: float
) -> float:
    """Return the seconds of a simulated step."""

    forward, input_backward, weight_backward = (tuple(column) for column in zip(*chunk_times, strict=True))
    actions = schedule_named(schedule)
    stages = [actions(len(chunk_times), m, stage) for stage in range(len(chunk_times))]
    return float(simulate(stages, Costs(forward, input_backward, weight_backward, transfer=transfer_s)).step_s)


# Sections of docs/scaling.md that are generated between markers; the rest of the page is written by hand.


def replace_section(text: str, name: str, section: str) -> str:
    """Return ``text`` with the text between the markers of ``name`` replaced by ``section``.

    Raises:
        ValueError: the page does not have both markers once, in order.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the page must have {begin} and then {end} once each. Put them where the section belongs")
    head, _, remainder = text.partition(begin)
    _, _, tail = remainder.partition(end)
    return f"{head}{begin}\n\n{section.strip()}\n\n{end}{tail}"


PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
SCHEDULES = ("1f1b", "gpipe", "zb-h1")


def main(argv: Sequence[str] | None = None) -> list[Prediction]:
    """Predict both series, print the table and write it into the page."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    machines = parser.add_mutually_exclusive_group()
    machines.add_argument("--gpu", choices=tuple(DATA_SHEETS), default="h100-80g", help="default: %(default)s")
    machines.add_argument("--machine", type=Path, metavar="FILE", help="a machine written by tools/plan.py --calibrate")
    parser.add_argument("--tensor", type=int, default=1, help="tensor ranks of each stage (default: 1)")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write a copy of the page to DIR (default: docs/)")
    args = parser.parse_args(argv)
    if args.tensor < 1:
        parser.error(f"--tensor must be at least 1, got {args.tensor}")
    page = PAGE
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        page = Path(shutil.copy(PAGE, args.out / PAGE.name))
    machine = Machine.load(args.machine) if args.machine else gpu_machine(args.gpu)
    results = predict(machine, tensor=args.tensor, schedule=args.schedule)
    if not results:
        raise SystemExit(f"--tensor {args.tensor} leaves no layout on {DEVICES[-1]:,} devices; use a smaller size")
    title = f"GPT 7B, s 2048, bf16, {machine.name}, {args.schedule}, tensor {args.tensor}"
    text = table(results)
    print(title, text, sep="\n")
    new = replace_section(page.read_text(encoding="utf-8"), "predicted", f"{title}.\n\n{text}")
    page.write_text(new, encoding="utf-8")
    print(f"written: {page}")
    return results


if __name__ == "__main__":
    main()

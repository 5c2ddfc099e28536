"""Draw a pipeline schedule, or a measured step of one, and print its bubble, step time and memory.

    python tools/draw_schedule.py --schedule zb-h1 --stages 8 --micro-batches 16
    python tools/draw_schedule.py --schedule interleaved --chunks 2 --stages 4 --micro-batches 8 --costs 1,1.1,0.9
    python tools/draw_schedule.py --schedule zb-v --stages 4 --micro-batches 8 --csv order.csv    # write the order
    python tools/draw_schedule.py --schedule-file order.csv                                       # read an order
    python tools/draw_schedule.py --trace DIR          # the trace of a run with "pipeline": {"trace": "DIR"}

All commands except the last simulate the schedule; they start no process and train nothing. The last one draws the
measured step above a simulation with the measured times.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.arguments.argparse_parsers import OneLineParser  # noqa: E402
from tds.schedule.simulate import MANY_CHUNKS, ONE_CHUNK, V_SCHEDULES, placement_for  # noqa: E402

NAMED_SCHEDULE_FLAGS = ("schedule", "stages", "micro_batches", "chunks", "group_size")
SCHEDULE_FLAGS = (*NAMED_SCHEDULE_FLAGS, "schedule_file", "costs", "transfer", "csv")
TRACE_FLAGS = ("trace", "step", "replica")


def main() -> int:
    """Draw the requested schedule; return the exit code."""
    parser = make_parser()
    flags = parser.parse_args()
    check_flags(parser, flags)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        if flags.trace is not None:
            draw_trace(flags)
        else:
            draw_schedule(flags)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser, which needs neither torch nor DeepSpeed."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--schedule", metavar="NAME", help="1f1b, gpipe, zb-h1, interleaved, zb-v or dualpipev")
    parser.add_argument(
        "--schedule-file", metavar="CSV", help="file with an order in torch's compute-only format: 0F0,0B0,1I2,1W2"
    )
    parser.add_argument("--stages", type=positive_int, metavar="P", help="number of pipeline stages")
    parser.add_argument("--micro-batches", type=positive_int, metavar="M", help="micro-batches per step")
    parser.add_argument("--chunks", type=positive_int, metavar="C", help="chunks per stage (default 1; 2 in a V)")
    parser.add_argument(
        "--group-size", type=positive_int, metavar="G",
        help="interleaved only: consecutive micro-batches per chunk (default: the number of stages)",
    )  # fmt: skip
    parser.add_argument(
        "--costs", type=cost_triple, metavar="F,B,W",
        help="times of a stage for one micro-batch: forward, backward for the input, backward for the weights, in any "
        "unit; each of c chunks takes 1/c of them (default 1,1,1)",
    )  # fmt: skip
    parser.add_argument("--transfer", type=duration, metavar="T", help="time of a message between stages (default 0)")
    parser.add_argument("--csv", metavar="FILE", help="also write the order in torch's compute-only format")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="draw a measured step")
    parser.add_argument("--step", type=int, metavar="N", help="step of the trace (default: the last)")
    parser.add_argument("--replica", type=int, metavar="R", help="replica of the trace (default 0)")
    parser.add_argument(
        "--out", type=Path, metavar="PNG",
        help="picture to write (default: named after the schedule in the working directory, or DIR/step-N.png)",
    )  # fmt: skip
    return parser


def check_flags(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Exit with code 2 unless the flags belong to one mode of this tool: a named schedule, a file or a trace."""
    planned = [f"--{name.replace('_', '-')}" for name in SCHEDULE_FLAGS if getattr(flags, name) is not None]
    measured = [f"--{name}" for name in TRACE_FLAGS if getattr(flags, name) is not None]
    if planned and measured:
        parser.error(f"{planned[0]} (simulation) and {measured[0]} (trace) cannot be combined. Remove one of them")
    if measured and flags.trace is None:
        parser.error(f"{measured[0]} has no effect without --trace DIR. Add --trace")
    missing = [name for name in ("schedule", "stages", "micro_batches") if getattr(flags, name) is None]
    if flags.schedule_file is not None:
        exclusive = [f"--{name.replace('_', '-')}" for name in NAMED_SCHEDULE_FLAGS if getattr(flags, name) is not None]
        if exclusive:
            parser.error(f"--schedule-file and {exclusive[0]} cannot be combined. Remove one of them")
    elif flags.trace is None and missing:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        parser.error(
            f"{names} missing. Set --schedule, --stages and --micro-batches, or --schedule-file CSV, or --trace DIR"
        )
    if flags.schedule is not None:
        check_schedule(parser, flags.schedule.lower(), get_num_chunks(flags), flags.group_size)
    if flags.out is not None and flags.out.suffix.lower() != ".png":
        parser.error(f"--out must end in .png, got {flags.out}")


def get_num_chunks(flags: argparse.Namespace) -> int:
    """Return the number of chunks per stage: --chunks, or the default of the schedule."""
    return flags.chunks or (2 if flags.schedule.lower() in V_SCHEDULES else 1)


def check_schedule(parser: argparse.ArgumentParser, name: str, num_chunks: int, group_size: int | None) -> None:
    """Exit with code 2 unless a schedule of that name exists for ``num_chunks`` chunks."""
    known = dict.fromkeys((*ONE_CHUNK, *MANY_CHUNKS, *V_SCHEDULES))
    if name not in known:
        parser.error(f"--schedule must be one of {', '.join(known)}, got {name}")
    if group_size is not None and (name not in MANY_CHUNKS or num_chunks == 1):
        parser.error(f"--group-size requires a schedule with interleaved chunks, got --schedule {name}. Remove it")
    if name in V_SCHEDULES:
        if num_chunks != 2:
            parser.error(f"--schedule {name} requires two chunks per stage, got --chunks {num_chunks}. Remove --chunks")
        return
    if name not in ONE_CHUNK and num_chunks == 1:
        parser.error(f"--schedule {name} requires several chunks per stage, got 1. Add --chunks 2")
    if name not in MANY_CHUNKS and num_chunks > 1:
        parser.error(f"--schedule {name} requires one chunk per stage, got --chunks {num_chunks}. Remove --chunks")


def draw_schedule(flags: argparse.Namespace) -> None:
    """Simulate a schedule, print its bubble, step time and memory, and draw it."""
    from tds import plot
    from tds.schedule import Costs, Placement, read_schedule, schedule_named, simulate, validate, write_schedule

    if flags.schedule_file is not None:
        order = read_schedule(flags.schedule_file)
        placement, num_micro_batches, name = order.placement, order.num_micro_batches, Path(flags.schedule_file).stem
    else:
        name, num_micro_batches = flags.schedule.lower(), flags.micro_batches
        placement = Placement(flags.stages, get_num_chunks(flags), placement_for(name))
        order = schedule_named(name, placement.num_chunks, placement.style, flags.group_size or 0)
    num_stages, num_chunks, placement_name = placement.num_stages, placement.num_chunks, placement.style
    stages = [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]
    peaks = validate(stages, num_micro_batches, num_chunks=num_chunks, placement=placement_name)
    forward, for_input, for_weights = (cost / num_chunks for cost in flags.costs or (1.0, 1.0, 1.0))
    costs = Costs.even(placement.num_virtual_stages, forward, for_input, for_weights, flags.transfer or 0.0)
    timeline = simulate(stages, costs, num_chunks, placement_name)
    chunks = f"-c{num_chunks}" if num_chunks > 1 else ""
    out = flags.out or Path(f"{name}-p{num_stages}-m{num_micro_batches}{chunks}.png")
    plot.draw_planned(name, timeline, peaks, num_micro_batches, num_chunks, out)
    chunks_text = f" of {num_chunks} chunks" if num_chunks > 1 else ""
    print(f"{name}: {num_stages} stages{chunks_text}, {num_micro_batches} micro-batches")
    print(f"bubble     {100 * timeline.bubble:.1f} %, at most {max(timeline.idle_s):.6g} idle per stage")
    print(f"step       {timeline.step_s:.6g}, in the unit of the costs")
    print(f"in flight  at most {format_peaks(peaks, 'chunks' if num_chunks > 1 else 'micro-batches')}")
    print(f"picture    {out}")
    if flags.csv is not None:
        write_schedule(flags.csv, stages, placement)
        print(f"order      {flags.csv}")


def format_peaks(peaks: list[int], unit: str) -> str:
    """Return the peaks of all stages as text, such as "8 micro-batches on each stage" if they are equal."""
    if len(set(peaks)) == 1:
        return f"{peaks[0]} {unit} on each stage"
    return f"{' '.join(map(str, peaks))} {unit} on the stages from 0"


def draw_trace(flags: argparse.Namespace) -> None:
    """Print the bubble and times of a measured step next to the prediction, and draw the step."""
    from tds import plot
    from tds.trace import read_traces

    replica = flags.replica or 0
    steps = {step.step: step for step in read_traces(flags.trace) if step.replica == replica}
    if not steps:
        raise ValueError(f"--replica must be a replica with a complete step in the trace {flags.trace}, got {replica}")
    selected_step = max(steps) if flags.step is None else flags.step
    if selected_step not in steps:
        raise ValueError(f"--step must be a complete step of the trace, one of {sorted(steps)}, got {selected_step}")
    step = steps[selected_step]
    out = flags.out or flags.trace / f"step-{selected_step}.png"
    plot.draw_measured(step, out)
    measured, predicted = step.timeline, plot.simulate_measured(step)
    print(
        f"{step.schedule}: step {selected_step}, {measured.num_stages} stages, {step.num_micro_batches} micro-batches"
    )
    print(f"bubble     {100 * measured.bubble:.1f} % measured, {100 * predicted.bubble:.1f} % predicted")
    print(f"step       {measured.step_s * 1e3:.4g} ms measured, {predicted.step_s * 1e3:.4g} ms predicted")
    print(f"picture    {out}")


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def duration(text: str) -> float:
    """Parse a time of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def cost_triple(text: str) -> tuple[float, float, float]:
    """Parse the times F, B and W of "F,B,W"."""
    values = [duration(field) for field in text.split(",")]
    if len(values) != 3 or not sum(values):
        raise argparse.ArgumentTypeError(f"must be three times F,B,W such as 1,1.2,0.9, not all 0, got {text!r}")
    return values[0], values[1], values[2]


if __name__ == "__main__":
    sys.exit(main())

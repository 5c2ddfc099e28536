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
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

from megatron.planner.machine import SHEETS  # noqa: E402

PAGE = ROOT / "docs" / "scaling.md"
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
    from benchmarks import scaling_points
    from benchmarks.scaling_parts import pictures
    from benchmarks.scaling_parts.page import update
    from megatron.planner.machine import Machine, device

    began = time.monotonic()
    machine = Machine.load(args.machine) if args.machine else device(args.gpu or "h100-80g")
    found = scaling_points.predictions(machine, tensor=args.tensor, schedule=args.schedule)
    if not found:
        raise SystemExit(f"--tensor {args.tensor} leaves no layout on {scaling_points.DEVICES[-1]:,} devices; use less")
    title = f"GPT 7B, s 2048, bf16, {machine.name}, {args.schedule}, tensor {args.tensor}"
    pictures.draw_predicted(found, title, page.parent / "pictures" / "scaling_predicted.png")
    text = scaling_points.table(found)
    print(title, text, sep="\n")
    update(page, "predicted", f"{title}.\n\n{text}\n\n![predicted efficiency](pictures/scaling_predicted.png)")
    print(f"{len(found)} layouts in {time.monotonic() - began:.1f} s", file=sys.stderr)
    return [{**vars(one), "step_s": one.step_s, "devices": one.devices} for one in found]


def measure(args: argparse.Namespace, page: Path) -> list[dict[str, Any]]:
    """Train every layout; write table and picture."""
    from benchmarks.machine import surroundings
    from benchmarks.scaling_parts import measured, pictures
    from benchmarks.scaling_parts.page import update

    points, cores, load = measured.points(args.ranks), len(os.sched_getaffinity(0)), os.getloadavg()[0]
    machines = {ranks: _calibrated(ranks, args.smoke) for ranks in sorted({point.ranks for point in points})}
    rows = []
    for number, point in enumerate(points, 1):
        rows.append(measured.measure(point, machines[point.ranks], args.steps, cores, is_smoke=args.smoke))
        _tell(f"{number} of {len(points)}: {point.series}, {point.name}: {rows[-1].step_s * 1e3:.0f} ms a step")
    here = surroundings()
    title = f"{here['processor']}, {cores} cores, load {load:.1f} ahead of it, commit {here['commit'][:9]}"
    pictures.draw_measured(rows, title, page.parent / "pictures" / "scaling_measured.png")
    text = measured.table(rows)
    print(title, text, sep="\n")
    told = f"{title}: `{here['command']}`.\n\n{text}\n\n![measured efficiency](pictures/scaling_measured.png)"
    update(page, "measured", told)
    result = [row.told() for row in rows]
    if args.out:
        (args.out / "measured.json").write_text(json.dumps({"surroundings": here, "rows": result}, indent=1) + "\n")
    return result


def _calibrated(ranks: int, is_smoke: bool) -> Any:
    from megatron.planner.calibrate import calibrate
    from megatron.planner.microbenchmarks import TimingBudget

    pace = (
        TimingBudget(window_s=0.01, windows=1, largest_side=256, numbers=2**16, turns=1, widest=128)
        if is_smoke
        else TimingBudget()
    )
    return calibrate(ranks, "cpu", tell=_tell, pace=pace, round_s=pace.window_s, threads=1)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

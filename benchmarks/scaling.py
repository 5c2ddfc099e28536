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

from benchmarks.scaling_points import TERMS, Prediction, Scaled, best  # noqa: E402
from megatron.planner.machine import SHEETS  # noqa: E402

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
    from megatron.planner.machine import Machine, device

    began = time.monotonic()
    machine = Machine.load(args.machine) if args.machine else device(args.gpu or "h100-80g")
    found = scaling_points.predictions(machine, tensor=args.tensor, schedule=args.schedule)
    if not found:
        raise SystemExit(f"--tensor {args.tensor} leaves no layout on {scaling_points.DEVICES[-1]:,} devices; use less")
    title = f"GPT 7B, s 2048, bf16, {machine.name}, {args.schedule}, tensor {args.tensor}"
    draw_predicted(found, title, page.parent / "pictures" / "scaling_predicted.png")
    text = scaling_points.table(found)
    print(title, text, sep="\n")
    update(page, "predicted", f"{title}.\n\n{text}\n\n![predicted efficiency](pictures/scaling_predicted.png)")
    print(f"{len(found)} layouts in {time.monotonic() - began:.1f} s", file=sys.stderr)
    return [{**vars(one), "step_s": one.step_s, "devices": one.devices} for one in found]


def measure(args: argparse.Namespace, page: Path) -> list[dict[str, Any]]:
    """Train every layout; write table and picture."""
    from benchmarks import scaling_points
    from benchmarks.machine import surroundings

    points, cores, load = scaling_points.points(args.ranks), len(os.sched_getaffinity(0)), os.getloadavg()[0]
    machines = {ranks: _calibrated(ranks, args.smoke) for ranks in sorted({point.ranks for point in points})}
    rows = []
    for number, point in enumerate(points, 1):
        rows.append(scaling_points.measure(point, machines[point.ranks], args.steps, cores, is_smoke=args.smoke))
        _log(f"{number} of {len(points)}: {point.series}, {point.name}: {rows[-1].step_s * 1e3:.0f} ms a step")
    here = surroundings()
    title = f"{here['processor']}, {cores} cores, load {load:.1f} before it, {time.strftime('%Y-%m-%d')}"
    draw_measured(rows, title, page.parent / "pictures" / "scaling_measured.png")
    text = scaling_points.measured_table(rows)
    print(title, text, sep="\n")
    told = f"{title}: `{here['command']}`.\n\n{text}\n\n![measured efficiency](pictures/scaling_measured.png)"
    update(page, "measured", told)
    result = [row.as_data() for row in rows]
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
    return calibrate(ranks, "cpu", tell=_log, pace=pace, round_s=pace.window_s, threads=1)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

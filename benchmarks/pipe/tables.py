"""The result of a case as lines of text and as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pipe.case import Case
from benchmarks.pipe.record import NUM_EQUAL_LOSSES, Record, fastest, ratio

COLOURS = {"ours": "tab:blue", "stock": "tab:orange", "dualpipev": "tab:red", "torch": "tab:green"}


def row(case: Case, record: Record, records: Mapping[str, Record]) -> dict[str, Any]:
    """Return the numbers of one contender."""
    speed = record.speed(case)
    mark = fastest(case, records.values(), "side by side")
    before, added = record.first_stage_bytes or (None, None)
    return {
        "contender": record.contender.name,
        "cut": record.cut,
        "tokens_per_s": speed,
        "ms_per_step": case.tokens / speed * 1e3,
        "cpu_ms_per_step": statistics.median(record.cpu_s) * 1e3,
        "of_side_by_side": None if mark is None else ratio(case, record, mark),
        "first_stage_bytes_before": before,
        "first_stage_bytes_added": added,
        "measured_to_simulated": statistics.median(record.measured_to_simulated or [float("nan")]),
        "losses": record.losses[:NUM_EQUAL_LOSSES],
    }


def table(case: Case, records: Mapping[str, Record]) -> str:
    """Return the case as lines of text, the fastest first."""
    lines = [
        f"{case.name}: {case.num_stages} stages x {case.tensor} tensor, {case.num_micro_batches} micro-batches of "
        f"{case.micro_batch_size}, {case.sizes.text}",
        f"  {'':32}{'cut':>18}{'tokens/s':>10}{'ms/step':>10}{'CPU ms':>9}{'of two':>8}{'MiB before+step':>17}"
        f"{'/simulate':>11}{'third loss':>12}",
    ]
    rows = [row(case, record, records) for record in records.values()]
    for each in sorted(rows, key=lambda each: -each["tokens_per_s"]):
        of_two = each["of_side_by_side"]
        before, added = each["first_stage_bytes_before"], each["first_stage_bytes_added"]
        memory = "" if before is None else f"{before / 2**20:.1f}+{added / 2**20:.1f}"
        simulated = each["measured_to_simulated"]
        lines.append(
            f"  {each['contender']:32}{each['cut']:>18}{each['tokens_per_s']:10.0f}{each['ms_per_step']:10.1f}"
            f"{each['cpu_ms_per_step']:9.1f}{'' if of_two is None else f'{of_two:.3f}':>8}{memory:>17}"
            f"{'' if simulated != simulated else f'{simulated:.3f}':>11}{each['losses'][-1]:12.6f}"
        )
    return "\n".join(lines)


def draw(cases: Mapping[Case, Mapping[str, Record]], path: Path) -> None:
    """Write a picture of all cases: tokens a second of each contender, with the slowest and the fastest turn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [1.0 + 0.3 * len(records) for records in cases.values()]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(cases), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, (case, records) in zip(axes, cases.items(), strict=True):
        ordered = sorted(records.values(), key=lambda record: record.speed(case))
        middles = [record.speed(case) for record in ordered]
        spread = [
            [middle - min(record.speeds(case)) for middle, record in zip(middles, ordered, strict=True)],
            [max(record.speeds(case)) - middle for middle, record in zip(middles, ordered, strict=True)],
        ]
        colours = [COLOURS.get(record.contender.kind, "tab:gray") for record in ordered]
        names = [record.contender.name for record in ordered]
        drawn = axis.barh(names, middles, xerr=spread, color=colours, ecolor="0.3", capsize=2)
        axis.bar_label(drawn, labels=[f"{middle:.0f}" for middle in middles], padding=4, fontsize=8)
        axis.set_title(case.name, fontsize=10)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.1)
    axes[-1].set_xlabel("tokens a second; lines from the slowest to the fastest turn")
    figure.savefig(path, dpi=120)

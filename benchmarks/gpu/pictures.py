"""What is to be looked at, made of the results so far: a bar chart of MFU, and the tables as Markdown.

Both are made anew at each start. ``python -m benchmarks.gpu.publish RESULTS.json`` puts the same into the pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import Case, Machine, Part, Skip
from benchmarks.gpu.tables import CONTENDERS, commit_of, layers_of, seen_table, speeds_table, timed

COLOURS = {"ours": "#4c72b0", "ours-compiled": "#1f3d6e", "hf": "#dd8452", "plain": "#8c8c8c"}
LABELS = {
    "ours": "ours",
    "ours-compiled": "ours, --compile",
    "hf": "Hugging Face's model, plain loop",
    "plain": "torch.nn layers, plain loop",
}
WIDTH = 0.2
"""Of a bar, where the models are 1 apart."""


def cases(machine: Machine) -> list[Case]:
    """Return the chart and the tables."""
    return [Case("chart of MFU", chart), Case("tables", tables)]


def chart(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    """Draw the chart into --out."""
    results = machine.results
    models = timed(results.content) if results else []
    if results is None or not models:
        raise Skip("no case of part speed has passed")
    try:
        path = draw(results.content, results.path.with_name(f"{results.path.stem}-mfu.png"))
    except ImportError as error:
        raise Skip(f"the chart needs matplotlib: {error}") from None
    bars = sum(len(figures["contenders"]) for figures in models)
    return f"{bars} bars of {len(models)} cases in {path.name}", {"bars": bars}


def tables(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    """Write the tables into --out."""
    results = machine.results
    if results is None:
        raise Skip("there are no results")
    text = seen_table([results.content], "en") + "\n"
    if models := timed(results.content):
        text += "\n" + speeds_table(results.content, "en") + "\n"
    path = results.path.with_suffix(".md")
    path.write_text(text, encoding="utf-8")
    return f"{len(models)} timed cases in {path.name}", {"timed": len(models)}


def draw(content: Mapping[str, Any], path: Path) -> Path:
    """Draw the MFU of each contender of each model into ``path``."""
    from matplotlib.figure import Figure

    models = timed(content)
    figure = Figure(figsize=(max(7.0, 1.3 * len(models) + 2.0), 4.6), dpi=150, facecolor="white", layout="constrained")
    axes = figure.subplots()
    for name in CONTENDERS:
        drawn = [
            (number, one["contenders"][name]["mfu"]) for number, one in enumerate(models) if name in one["contenders"]
        ]
        places = [number + _shift(models[number], name) for number, _ in drawn]
        if drawn:
            bars = axes.bar(places, [mfu for _, mfu in drawn], WIDTH * 0.92, color=COLOURS[name], label=LABELS[name])
            axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    axes.set_xticks(range(len(models)), [_tick(figures) for figures in models], fontsize=8)
    axes.set_ylabel("MFU: share of this run's matrix products")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0.0, 1.0))
    axes.set_title(_title(content), fontsize=9, loc="right", pad=38)
    figure.savefig(path, metadata={"Software": None})
    return path


def _shift(figures: Mapping[str, Any], name: str) -> float:
    """Return where a contender's bar stands beside the others of its model."""
    there: Sequence[str] = [each for each in CONTENDERS if each in figures["contenders"]]
    return WIDTH * (there.index(name) - (len(there) - 1) / 2)


def _tick(figures: Mapping[str, Any]) -> str:
    return f"{figures['title']}{layers_of(figures)}\n{figures['seq_length']} tokens x {figures['batch_size']}"


def _title(content: Mapping[str, Any]) -> str:
    dry = "dry run at toy sizes, figures mean nothing: " if content["is_dry"] else ""
    return f"{dry}{content['device']}, {content['date']}, commit {commit_of(content)}"


PART = Part(
    name="pictures",
    about="a chart of MFU and the tables, made of the results so far",
    cases=cases,
    budget_s=20.0,
    is_always=True,
)

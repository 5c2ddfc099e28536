"""Heat map of experts: each expert's tokens relative to the mean of its layer, in the last record with token counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.report_parts.runs import RunFolder, number
from tools.report_parts.words import Html, bilingual, joined, tag

TABLE = "moe_tokens_per_expert"
WIDTH, LEFT, RIGHT, FOOT = 1200, 120, 60, 18
WIDEST, ROW = 40, 20
MOST_TITLES = 6000
"""Maximum number of cells with tooltips; above it, only rows have tooltips."""
DARKEST = 3.0
"""Multiple of the mean from which on a cell has the darkest colour."""
STEPS = (0.0, 0.5, 1.0, 2.0, 3.0)


def expert_map(run: RunFolder) -> Html | None:
    """Return the heat map, a row for each layer and a cell for each expert; None if no record has token counts."""
    record = next(
        (record_candidate for record_candidate in reversed(run.of_kind("train")) if _table(record_candidate)), None
    )
    if record is None:
        return None
    table = _table(record)
    most = max(map(len, table.values()))
    width = min((WIDTH - LEFT - RIGHT) / most, WIDEST)
    has_titles = sum(map(len, table.values())) <= MOST_TITLES
    rows = [_row(row_idx, layer, counts, width, has_titles) for row_idx, (layer, counts) in enumerate(table.items())]
    height = len(table) * ROW
    labels = [
        tag("text", expert, x=f"{LEFT + (expert + 0.5) * width:.1f}", y=height + FOOT - 5, class_="foot")
        for expert in dict.fromkeys((0, most // 2, most - 1))
    ]
    worst = max(table, key=lambda layer: _imbalance(table[layer]))
    text = f"Tokens by expert, {len(table)} layers x {most} experts, step {record['step']}: in {worst} the largest has "
    text += f"{_imbalance(table[worst]):.2f} times the mean"
    svg = tag("svg", tag("title", text), *rows, *labels, viewBox=f"0 0 {WIDTH} {height + FOOT}", class_="heat",
                  role="img", aria_label=text)  # fmt: skip
    about = bilingual(
        "Step {}: one row per layer, one cell per expert. The end of a row shows its largest expert over the mean.",
        f"{record['step']:,}",
    )
    return tag("div", tag("p", about), tag("div", svg, class_="scroll"), _legend())


def _table(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return layer -> tokens of each expert, for layers with complete counts."""
    rows = record.get(TABLE)
    if not isinstance(rows, dict):
        return {}
    table = {
        layer: [number(count_value) for count_value in row] for layer, row in rows.items() if isinstance(row, list)
    }
    return {
        layer: [count for count in row if count is not None]
        for layer, row in table.items()
        if row and all(count is not None and count >= 0 for count in row) and any(row)
    }


def _imbalance(counts: list[float]) -> float:
    return max(counts) * len(counts) / sum(counts)


def _row(at: int, layer: str, counts: list[float], width: float, has_titles: bool) -> Html:
    total, y, cells = sum(counts), at * ROW, []
    for expert, count in enumerate(counts):
        share = count / total
        title = (
            f"{layer}, expert {expert}: {100 * share:.2f} % ({count:,.0f} tokens, {share * len(counts):.2f} x the mean)"
        )
        cells.append(
            tag(
                "rect", *([tag("title", title)] if has_titles else []), x=f"{LEFT + expert * width:.2f}", y=y,
                width=f"{width:.2f}", height=ROW - 2, **_colour(share * len(counts)),
            )
        )  # fmt: skip
    name = tag("text", layer, x=LEFT - 8, y=y + ROW - 7, class_="layer")
    end = tag("text", f"{_imbalance(counts):.2f}", x=f"{LEFT + len(counts) * width + 8:.1f}", y=y + ROW - 7)
    return tag("g", tag("title", f"{layer}: {_imbalance(counts):.2f} x the mean"), name, *cells, end)


def _colour(over_mean: float) -> dict[str, Any]:
    """Return the attributes of a cell; an expert without a token has a separate colour."""
    if not over_mean:
        return {"class_": "tokens none"}
    return {"class_": "tokens", "fill_opacity": f"{0.08 + 0.92 * min(over_mean / DARKEST, 1):.2f}"}


def _legend() -> Html:
    marks = []
    for multiple in STEPS:
        text = bilingual("no token") if not multiple else bilingual("{} x the mean", f"{multiple:g}")
        if multiple == STEPS[-1]:
            text = bilingual("{} x the mean or more", f"{multiple:g}")
        box = tag("svg", tag("rect", width=18, height=12, **_colour(multiple)), width=18, height=12, aria_hidden="true")
        marks.append(tag("span", box, " ", text, " "))
    return tag("p", joined(marks), class_="legend")

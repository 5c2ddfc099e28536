"""Heat map of expert load: tokens per expert relative to the layer's mean, from the last record with token counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.report_parts.runs import RunFolder, finite_number
from tools.report_parts.words import Html, bilingual, join_html, tag

METRIC = "moe_tokens_per_expert"
WIDTH, LEFT, RIGHT, FOOTER_HEIGHT = 1200, 120, 60, 18
MAX_CELL_WIDTH, ROW_HEIGHT = 40, 20
MAX_TITLES = 6000
"""Maximum number of cells with tooltips; in larger maps, only rows have tooltips."""
DARKEST_RATIO = 3.0
"""Cells at this ratio to the mean or above have the darkest colour."""
LEGEND_RATIOS = (0.0, 0.5, 1.0, 2.0, 3.0)


def expert_map(run: RunFolder) -> Html | None:
    """Return the heat map, with a row per layer and a cell per expert; None if no record has token counts."""
    record = next(
        (train_record for train_record in reversed(run.records_of_type("train")) if _token_counts(train_record)), None
    )
    if record is None:
        return None
    table = _token_counts(record)
    max_experts = max(map(len, table.values()))
    width = min((WIDTH - LEFT - RIGHT) / max_experts, MAX_CELL_WIDTH)
    has_titles = sum(map(len, table.values())) <= MAX_TITLES
    rows = [_row(row_idx, layer, counts, width, has_titles) for row_idx, (layer, counts) in enumerate(table.items())]
    height = len(table) * ROW_HEIGHT
    labels = [
        tag("text", expert, x=f"{LEFT + (expert + 0.5) * width:.1f}", y=height + FOOTER_HEIGHT - 5, class_="foot")
        for expert in dict.fromkeys((0, max_experts // 2, max_experts - 1))
    ]
    worst = max(table, key=lambda layer: _imbalance(table[layer]))
    text = f"Tokens by expert, {len(table)} layers x {max_experts} experts, step {record['step']}: "
    text += f"the busiest expert of {worst} has {_imbalance(table[worst]):.2f} times the mean"
    svg = tag("svg", tag("title", text), *rows, *labels, viewBox=f"0 0 {WIDTH} {height + FOOTER_HEIGHT}", class_="heat",
                  role="img", aria_label=text)  # fmt: skip
    about = bilingual(
        "Step {}: one row per layer, one cell per expert. Each row ends with its largest load divided by the mean.",
        f"{record['step']:,}",
    )
    return tag("div", tag("p", about), tag("div", svg, class_="scroll"), _legend())


def _token_counts(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return layer -> token counts of its experts, without layers whose counts are incomplete."""
    rows = record.get(METRIC)
    if not isinstance(rows, dict):
        return {}
    table = {
        layer: [finite_number(count_value) for count_value in row]
        for layer, row in rows.items()
        if isinstance(row, list)
    }
    return {
        layer: [count for count in row if count is not None]
        for layer, row in table.items()
        if row and all(count is not None and count >= 0 for count in row) and any(row)
    }


def _imbalance(counts: list[float]) -> float:
    return max(counts) * len(counts) / sum(counts)


def _row(row_idx: int, layer: str, counts: list[float], width: float, has_titles: bool) -> Html:
    total, y, cells = sum(counts), row_idx * ROW_HEIGHT, []
    for expert, count in enumerate(counts):
        share = count / total
        title = (
            f"{layer}, expert {expert}: {100 * share:.2f} % ({count:,.0f} tokens, {share * len(counts):.2f} x the mean)"
        )
        cells.append(
            tag(
                "rect", *([tag("title", title)] if has_titles else []), x=f"{LEFT + expert * width:.2f}", y=y,
                width=f"{width:.2f}", height=ROW_HEIGHT - 2, **_cell_attributes(share * len(counts)),
            )
        )  # fmt: skip
    name = tag("text", layer, x=LEFT - 8, y=y + ROW_HEIGHT - 7, class_="layer")
    end = tag("text", f"{_imbalance(counts):.2f}", x=f"{LEFT + len(counts) * width + 8:.1f}", y=y + ROW_HEIGHT - 7)
    return tag("g", tag("title", f"{layer}: {_imbalance(counts):.2f} x the mean"), name, *cells, end)


def _cell_attributes(ratio_to_mean: float) -> dict[str, Any]:
    """Return the SVG attributes of a cell; experts without tokens have a separate colour."""
    if not ratio_to_mean:
        return {"class_": "tokens none"}
    return {"class_": "tokens", "fill_opacity": f"{0.08 + 0.92 * min(ratio_to_mean / DARKEST_RATIO, 1):.2f}"}


def _legend() -> Html:
    marks = []
    for multiple in LEGEND_RATIOS:
        text = bilingual("no tokens") if not multiple else bilingual("{} x the mean", f"{multiple:g}")
        if multiple == LEGEND_RATIOS[-1]:
            text = bilingual("{} x the mean or more", f"{multiple:g}")
        box = tag(
            "svg",
            tag("rect", width=18, height=12, **_cell_attributes(multiple)),
            width=18,
            height=12,
            aria_hidden="true",
        )
        marks.append(tag("span", box, " ", text, " "))
    return tag("p", join_html(marks), class_="legend")

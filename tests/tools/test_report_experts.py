"""The heat map of experts on the page of ``tools/report.py``: every share, every layer, and colours all can read."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tools.made_runs import make_record, make_run
from tests.tools.test_report import COLOR_VISION_MATRICES, PageReader, cielab, linear_rgb, read_page
from tools import report
from tools.report_parts import experts
from tools.report_parts.experts import LEGEND_RATIOS, expert_map
from tools.report_parts.runs import MAX_LINES, RunFolder, read_run

TOKENS_PER_EXPERT = {"layers.1": [10, 30, 0, 40], "layers.3": [20, 20, 20, 20]}
EXPERT_METRICS = {
    "moe_load_imbalance": {"layers.1": 2.0, "layers.3": 1.0}, "moe_entropy": {"layers.1": 0.7, "layers.3": 1.0},
    "moe_dropped": {"layers.1": 0.05, "layers.3": 0.0}, "moe_tokens_per_expert": TOKENS_PER_EXPERT,
}  # fmt: skip


def make_run_with_records(folder: Path, *records: dict[str, Any]) -> Path:
    with (make_run(folder) / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in records)
    return folder


def find_cells(reader: PageReader) -> list[dict[str, str | None]]:
    """Return the cells of the picture, without those of the legend."""
    cells = [attributes for tag, attributes in reader.tags if tag == "rect" and "tokens" in (attributes["class"] or "")]
    return [cell for cell in cells if "x" in cell]


def test_page_shows_heat_map_and_curves_of_experts(tmp_path: Path) -> None:
    earlier_metrics = {
        **EXPERT_METRICS,
        "moe_tokens_per_expert": {"layers.1": [1, 1, 1, 77], "layers.3": [80, 0, 0, 0]},
    }
    reader = read_page(
        make_run_with_records(
            tmp_path / "run", make_record(61, **earlier_metrics), make_record(62, **EXPERT_METRICS), make_record(63)
        )
    )
    cells = find_cells(reader)
    assert len(cells) == 8 and len({(cell["x"], cell["y"]) for cell in cells}) == 8
    strength = [float(cell["fill-opacity"] or 0) if "fill-opacity" in cell else None for cell in cells]
    assert strength[2] is None and cells[2]["class"] == "tokens none", "no token is another colour, not a weak one"
    assert strength[0] < strength[4] == strength[7] < strength[1] < strength[3]  # type: ignore[operator]
    page_text = " ".join(reader.words)
    assert "Tokens by expert" in page_text and "各专家的词元数" in page_text
    assert "layers.1, expert 1: 37.50 % (30 tokens, 1.50 x the mean)" in page_text
    (label,) = [attributes["aria-label"] for tag, attributes in reader.tags if attributes.get("class") == "heat"]
    assert label == (
        "Tokens by expert, 2 layers x 4 experts, step 62: the busiest expert of layers.1 has 2.00 times the mean"
    )
    data = reader.data()
    charts = {chart["id"]: chart["keys"] for chart in data["charts"]}
    for name in ("load_imbalance", "entropy", "dropped"):
        chart = {"load_imbalance": "load-imbalance", "entropy": "expert-entropy"}.get(name, name)
        assert charts[chart] == [f"moe_{name}/layers.1", f"moe_{name}/layers.3"]
    assert data["runs"][0]["columns"]["moe_load_imbalance/layers.1"][-2:] == [2.0, None]
    assert not [name for name in data["runs"][0]["columns"] if "tokens_per_expert" in name], "no columns of nothing"


def test_dense_run_and_damaged_table_have_no_heat_map(tmp_path: Path) -> None:
    assert expert_map(read_run(make_run(tmp_path / "dense"), "dense")) is None
    for table in (None, [], {}, {"layers.0": []}, {"layers.0": [0, 0]}, {"layers.0": [1, "x"]}, {"layers.0": [1, -1]}):
        assert expert_map(make_run_folder(table)) is None
    assert str(expert_map(make_run_folder({"layers.0": [1, "x"], "<b>": [3, 1]}))).count('class="layer"') == 1
    assert "<b>" not in str(expert_map(make_run_folder({"<b>": [3, 1]})))


def make_run_folder(table: Any) -> RunFolder:
    return RunFolder(Path(), "run", records=[{"kind": "train", "step": 1, "moe_tokens_per_expert": table}])


def test_large_heat_map_omits_cell_titles(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {f"layers.{layer}": [1 + (layer * expert) % 7 for expert in range(256)] for layer in range(2 * MAX_LINES)}
    text = str(expert_map(make_run_folder(table)))
    assert text.count("<rect") == 48 * 256 + len(LEGEND_RATIOS) and ", expert " not in text
    monkeypatch.setattr(experts, "MAX_TITLES", 48 * 256)
    assert str(expert_map(make_run_folder(table))).count(", expert ") == 48 * 256


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_legend_colors_are_distinguishable(theme: str) -> None:
    text = (Path(report.__file__).parent / "report_parts" / "page.html").read_text(encoding="utf-8")
    colour = {
        name: re.findall(rf"--{name}: (#[0-9a-f]{{6}})", text)[theme == "dark"] for name in ("card", "accent", "warn")
    }

    def mixed(over_mean: float) -> np.ndarray:
        """Return the linear light of a cell: browsers mix what lies over one another by the numbers of colours."""
        strength = float(experts._cell_attributes(over_mean)["fill_opacity"])
        colors = [
            np.array([int(colour[name][offset : offset + 2], 16) for offset in (1, 3, 5)])
            for name in ("card", "accent")
        ]
        shown = (1 - strength) * colors[0] + strength * colors[1]
        return linear_rgb("#" + "".join(f"{round(channel):02x}" for channel in shown))

    shades = [linear_rgb(colour["warn"]), *map(mixed, LEGEND_RATIOS[1:])]
    for eyes, matrix in COLOR_VISION_MATRICES.items():
        seen_colors = [cielab(np.clip(np.array(matrix) @ shade, 0, 1)) for shade in shades]
        assert (
            min(float(np.linalg.norm(first - second)) for first, second in itertools.combinations(seen_colors, 2)) > 8
        ), eyes

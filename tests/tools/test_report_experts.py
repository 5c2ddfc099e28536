"""The heat map of experts on the page of ``tools/report.py``: every share, every layer, and colours all can read."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tools.made_runs import make_run, record
from tests.tools.test_report import LINEAR_TO_SEEN, Reader, lab, linear, read
from tools import report
from tools.report_parts import experts
from tools.report_parts.experts import STEPS, expert_map
from tools.report_parts.runs import MOST_LINES, RunFolder, read_run

TABLE = {"layers.1": [10, 30, 0, 40], "layers.3": [20, 20, 20, 20]}
OF_EXPERTS = {
    "moe_load_imbalance": {"layers.1": 2.0, "layers.3": 1.0}, "moe_entropy": {"layers.1": 0.7, "layers.3": 1.0},
    "moe_dropped": {"layers.1": 0.05, "layers.3": 0.0}, "moe_tokens_per_expert": TABLE,
}  # fmt: skip


def with_records(folder: Path, *records: dict[str, Any]) -> Path:
    with (make_run(folder) / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in records)
    return folder


def drawn(found: Reader) -> list[dict[str, str | None]]:
    """Return the cells of the picture, without those of the legend."""
    cells = [attributes for tag, attributes in found.tags if tag == "rect" and "tokens" in (attributes["class"] or "")]
    return [cell for cell in cells if "x" in cell]


def test_the_page_has_a_cell_for_each_expert_of_the_last_record_and_a_curve_for_each_layer(tmp_path: Path) -> None:
    before = {**OF_EXPERTS, "moe_tokens_per_expert": {"layers.1": [1, 1, 1, 77], "layers.3": [80, 0, 0, 0]}}
    found = read(with_records(tmp_path / "run", record(61, **before), record(62, **OF_EXPERTS), record(63)))
    cells = drawn(found)
    assert len(cells) == 8 and len({(cell["x"], cell["y"]) for cell in cells}) == 8
    strength = [float(cell["fill-opacity"] or 0) if "fill-opacity" in cell else None for cell in cells]
    assert strength[2] is None and cells[2]["class"] == "tokens none", "no token is another colour, not a weak one"
    assert strength[0] < strength[4] == strength[7] < strength[1] < strength[3]  # type: ignore[operator]
    words = " ".join(found.words)
    assert "Tokens by expert" in words and "各专家的词元数" in words
    assert "layers.1, expert 1: 37.50 % (30 tokens, 1.50 x the mean)" in words
    (label,) = [attributes["aria-label"] for tag, attributes in found.tags if attributes.get("class") == "heat"]
    assert label == "Tokens by expert, 2 layers x 4 experts, step 62: in layers.1 the largest has 2.00 times the mean"
    data = found.data()
    charts = {chart["id"]: chart["keys"] for chart in data["charts"]}
    for name in ("load_imbalance", "entropy", "dropped"):
        chart = {"load_imbalance": "load-imbalance", "entropy": "expert-entropy"}.get(name, name)
        assert charts[chart] == [f"moe_{name}/layers.1", f"moe_{name}/layers.3"]
    assert data["runs"][0]["columns"]["moe_load_imbalance/layers.1"][-2:] == [2.0, None]
    assert not [name for name in data["runs"][0]["columns"] if "tokens_per_expert" in name], "no columns of nothing"


def test_a_dense_run_and_a_damaged_table_have_no_picture(tmp_path: Path) -> None:
    assert expert_map(read_run(make_run(tmp_path / "dense"), "dense")) is None
    for table in (None, [], {}, {"layers.0": []}, {"layers.0": [0, 0]}, {"layers.0": [1, "x"]}, {"layers.0": [1, -1]}):
        assert expert_map(made(table)) is None
    assert str(expert_map(made({"layers.0": [1, "x"], "<b>": [3, 1]}))).count('class="layer"') == 1
    assert "<b>" not in str(expert_map(made({"<b>": [3, 1]})))


def made(table: Any) -> RunFolder:
    return RunFolder(Path(), "run", records=[{"kind": "train", "step": 1, "moe_tokens_per_expert": table}])


def test_a_large_model_has_a_picture_of_every_cell_without_a_text_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {f"layers.{layer}": [1 + (layer * expert) % 7 for expert in range(256)] for layer in range(2 * MOST_LINES)}
    text = str(expert_map(made(table)))
    assert text.count("<rect") == 48 * 256 + len(STEPS) and ", expert " not in text
    monkeypatch.setattr(experts, "MOST_TITLES", 48 * 256)
    assert str(expert_map(made(table))).count(", expert ") == 48 * 256


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_steps_of_the_legend_are_colours_that_everyone_tells_apart(theme: str) -> None:
    text = (Path(report.__file__).parent / "report_parts" / "page.html").read_text(encoding="utf-8")
    colour = {
        name: re.findall(rf"--{name}: (#[0-9a-f]{{6}})", text)[theme == "dark"] for name in ("card", "accent", "warn")
    }

    def mixed(over_mean: float) -> np.ndarray:
        """Return the linear light of a cell: browsers mix what lies over one another by the numbers of colours."""
        strength = float(experts._colour(over_mean)["fill_opacity"])
        parts = [np.array([int(colour[name][at : at + 2], 16) for at in (1, 3, 5)]) for name in ("card", "accent")]
        shown = (1 - strength) * parts[0] + strength * parts[1]
        return linear("#" + "".join(f"{round(part):02x}" for part in shown))

    shades = [linear(colour["warn"]), *map(mixed, STEPS[1:])]
    for eyes, seen in LINEAR_TO_SEEN.items():
        found = [lab(np.clip(np.array(seen) @ shade, 0, 1)) for shade in shades]
        assert min(float(np.linalg.norm(one - two)) for one, two in itertools.combinations(found, 2)) > 8, eyes

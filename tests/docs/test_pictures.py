"""tools/docs.py: every picture of the pages can be drawn anew, from the numbers that the pages say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tools import docs

ROOT = Path(__file__).resolve().parents[2]


def test_pictures_that_pages_show_are_there_and_those_of_the_tool_are_shown() -> None:
    pages = [ROOT / "docs" / "parallelism.md", ROOT / "docs" / "pipelines.md"]
    shown = {name for page in pages for name in re.findall(r"\]\(pictures/([\w-]+)\.png\)", page.read_text())}
    assert shown == set(docs.PICTURES)
    assert all((ROOT / "docs" / "pictures" / f"{name}.png").is_file() for name in shown)


@pytest.mark.slow
def test_a_picture_is_drawn_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["docs.py", "--out", str(tmp_path / "new"), "--only", "grid", "layer", "zero"])
    assert docs.main() == 0
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert sorted(drawn) == ["grid.png", "layer.png", "zero.png"]
    assert all(content.startswith(b"\x89PNG") and len(content) > 10_000 for content in drawn.values())


def test_the_bytes_of_the_picture_are_those_of_the_table_of_memory() -> None:
    text = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    formulas = dict(re.findall(r"^\| ([0-3]) \| [^|]* \| ([^|]*) \|", text, flags=re.M))
    d = docs.REPLICAS
    for stage, formula in formulas.items():
        drawn = sum(docs.bytes_held(what, int(stage), d) for what in docs.HELD)
        assert drawn == pytest.approx(eval(formula.replace(" d", str(d))))  # such as 2 + 4 + 12 / d
    assert len(formulas) == 4

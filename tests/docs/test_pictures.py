"""tools/docs.py: every picture of the pages can be drawn anew, from the numbers that the pages say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tools import docs

ROOT = Path(__file__).resolve().parents[2]


def test_pages_show_all_generated_pictures() -> None:
    pages = [ROOT / "docs" / "parallelism.md", ROOT / "docs" / "pipelines.md"]
    shown = {name for page in pages for name in re.findall(r"\]\(pictures/([\w-]+)\.png\)", page.read_text())}
    assert shown == set(docs.PICTURES)
    assert all((ROOT / "docs" / "pictures" / f"{name}.png").is_file() for name in shown)


@pytest.mark.slow
def test_pictures_are_drawn_to_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["docs.py", "--out", str(tmp_path / "new"), "--only", "grid", "layer", "zero"])
    assert docs.main() == 0
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert sorted(drawn) == ["grid.png", "layer.png", "zero.png"]
    assert all(content.startswith(b"\x89PNG") and len(content) > 10_000 for content in drawn.values())


def test_picture_bytes_equal_memory_table() -> None:
    text = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    formulas = dict(re.findall(r"^\| ([0-3]) \| [^|]* \| ([^|]*) \|", text, flags=re.M))
    num_replicas = docs.NUM_REPLICAS
    for stage, formula in formulas.items():
        num_bytes = sum(
            docs.bytes_per_replica(tensor_type, int(stage), num_replicas) for tensor_type in docs.BYTES_PER_PARAMETER
        )
        assert num_bytes == pytest.approx(eval(formula.replace(" d", str(num_replicas))))  # such as 2 + 4 + 12 / d
    assert len(formulas) == 4

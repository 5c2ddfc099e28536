"""``benchmarks/documents.py`` in toy sizes: a row of each length, and one of the mask."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import documents


def test_each_length_has_a_row_beside_the_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--seq-length 64 --lengths 64 8 --num-layers 1 --hidden-size 16 --heads 2 --rounds 2 --json".split()
    assert documents.main([*words, str(tmp_path / "found.json")]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert list(rows) == ["64", "8", "mask"] and rows["64"]["times"] == rows["mask"]["times_mask"] == 1.0
    assert all(row["ms"] > 0 for row in rows.values()) and "as the mask" in capsys.readouterr().out

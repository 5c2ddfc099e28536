"""``benchmarks/experts.py`` in toy sizes: a row of each way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import experts


def test_each_way_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--tokens 16 --hidden-size 16 --expert-size 16 --experts 4 --rounds 2 --json".split()
    assert experts.main([*words, str(tmp_path / "found.json")]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert list(rows) == ["loop", "grouped"] and rows["loop"]["times"] == 1.0
    assert all(row["ms"] > 0 for row in rows.values()) and "as the loop" in capsys.readouterr().out

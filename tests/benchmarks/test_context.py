"""``benchmarks/context.py`` in toy sizes: a row of each way, with counts that are those of the planner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import context


def test_each_way_has_a_row_and_counts_what_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--seq-length 64 --sizes 1 2 --num-layers 1 --hidden-size 32 --heads 4 --groups 2 --rounds 1 --mean 9".split()
    )
    assert context.main([*words, "--json", str(tmp_path / "found.json")], start_method="fork") == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert list(rows) == ["cp 1", "cp 2 all_gather", "cp 2 a2a"] and rows["cp 1"]["times"] == 1.0
    for row in rows.values():
        assert row["sent"] == row["sent_planned"] and row["kept"] == pytest.approx(row["kept_planned"], rel=0.1)
    assert "MB sent" in capsys.readouterr().out

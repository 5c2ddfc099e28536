"""Measured figures on other pages are those of the ledger, docs/experiments.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
LEDGER = [row for row in (DOCS / "experiments.md").read_text("utf-8").splitlines() if row.startswith("| 20")]


@pytest.mark.parametrize("page", ["tuning.md", "zh/tuning.md"])
def test_the_steps_beside_others_are_rows_of_the_ledger(page: str) -> None:
    """Row by row: the command above the table, the date, and each figure with its thousands or decimals."""
    section = (DOCS / page).read_text("utf-8").split("\n## ")[-1]
    commands = re.findall(r"^    (python benchmarks/step_time\.py .*)$", section, flags=re.M)
    rows = re.findall(r"^\| [^|]+, (\d{4}-\d\d-\d\d) \|(.*)\|$", section, flags=re.M)
    assert len(rows) == 3
    for command, (date, cells) in zip(commands, rows, strict=True):
        measured = [row for row in LEDGER if row.startswith(f"| {date} |") and f"`{command}`" in row]
        figures = re.findall(r"\d,\d{3}|\d\.\d{3}", cells)
        assert len(figures) >= 6 and any(all(figure in row for figure in figures) for row in measured), command

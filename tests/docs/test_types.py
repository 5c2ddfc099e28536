"""The table of docs/types.md has the number of mutants of each section, and of those that the types detect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.types.test_mutants import DETECTED, MUTANTS

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| .+ \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)


def count_by_section() -> list[tuple[int, int, int]]:
    """Return (mutants, detected by types, detected by numbers) of each section of ``tests/mutants/mpu.py``."""
    text = (ROOT / "tests" / "mutants" / "mpu.py").read_text(encoding="utf-8")
    counts = []
    for section in re.split(r"^# .+$", text, flags=re.MULTILINE)[1:]:
        names = [f"mpu.{name}" for name in re.findall(r"^def (\w+)\(original: Any\)", section, re.MULTILINE)]
        assert set(names) <= set(MUTANTS)
        counts.append((len(names), len(DETECTED.keys() & set(names)), sum(bool(MUTANTS[name].tests) for name in names)))
    return counts


@pytest.mark.parametrize("page", ["types.md", "zh/types.md"])
def test_table_counts_mutants_of_each_section(page: str) -> None:
    rows = ROW.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert [tuple(map(int, row)) for row in rows] == count_by_section()

"""docs/optimizers.md: its tables are those that the planner generates."""

from __future__ import annotations

import re
from pathlib import Path

from megatron.planner.optimizer_tables import optimizer_rows, stage_rows, table

DOCS = Path(__file__).resolve().parents[2] / "docs"


def read_values(text: str) -> list[list[str]]:
    """Return the numbers of each row of a Markdown table."""
    return [re.findall(r"[\d.,]*\d", line) for line in text.splitlines()[2:]]


def test_tables_are_generated() -> None:
    english, chinese = ((DOCS / page).read_text(encoding="utf-8") for page in ("optimizers.md", "zh/optimizers.md"))
    for rows in (optimizer_rows, stage_rows):
        generated = table(rows())
        assert generated in english
        assert all(
            any(read_values(f"\n\n{line}") == [values] for line in chinese.splitlines())
            for values in read_values(generated)
        )

"""docs/reliability.md: no row is left out, every test that holds one is there, and so is each planted mistake."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

from tests.mutants.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / "reliability.md", ROOT / "docs" / "zh" / "reliability.md"]
UNUSED = {"A": {15, 21, 24}, "K": {3, 5, 29}, "D": {15, 20}, "N": {8}, "I": {4, 7}, "P": {6, 8}}
"""Numbers that no row has."""
LAST = {"A": 25, "K": 32, "C": 21, "D": 25, "N": 10, "I": 9, "P": 14, "E": 21}
WANTED = {
    f"{letter}{number:02}"
    for letter, last in LAST.items()
    for number in range(1, last + 1)
    if number not in UNUSED.get(letter, set())
}
MISTAKES = 27
HELD_BY = tomllib.loads((ROOT / "tests" / "reliability" / "held_by.toml").read_text("utf-8"))
"""Row -> its tests; planted mistake -> its mutants."""

every_page = pytest.mark.parametrize("page", PAGES, ids=["english", "chinese"])


def rows_of(text: str) -> dict[str, list[str]]:
    """Return the cells of each row by its number."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    found = [cells for cells in lines if re.fullmatch(r"[A-Z]\d\d", cells[0])]
    assert len({cells[0] for cells in found}) == len(found), "a row stands once"
    return {cells[0]: cells for cells in found}


def parts(page: Path) -> list[str]:
    """Return the text of each section; the last one holds what is named and not held."""
    return re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.M)


@functools.cache
def functions_in(file: Path) -> dict[str, bool]:
    """Return the test functions of a file, with whether all of them is slow; nothing is imported."""
    if not file.exists():
        return {}
    functions = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    return {
        function.name: any(ast.unparse(mark) == "pytest.mark.slow" for mark in function.decorator_list)
        for function in functions
    }


def held_by(row: str) -> list[tuple[Path, str]]:
    return [(ROOT / file, name) for file, _, name in (test.partition("::") for test in HELD_BY["rows"][row])]


@every_page
def test_every_row_is_there_and_at_least_115_are_held(page: Path) -> None:
    *held, rest = parts(page)
    rows, unheld = rows_of("\n".join(held)), rows_of(rest)
    assert rows.keys() | unheld.keys() == WANTED and not rows.keys() & unheld.keys()
    assert all(all(cells) for cells in (*rows.values(), *unheld.values())), "an empty cell"
    faults = [number for number in rows if not number.startswith("E")]
    assert len(faults) >= 115


def test_every_row_has_tests_that_exist_and_none_rests_on_slow_ones_alone() -> None:
    assert HELD_BY["rows"].keys() == WANTED
    for row in WANTED:
        tests = held_by(row)
        assert tests, f"{row} has no test"
        for file, name in tests:
            assert name in functions_in(file), f"{row}: {file.relative_to(ROOT)}::{name}"
        assert not all(functions_in(file)[name] for file, name in tests), f"{row} is held by slow tests alone"


def test_both_pages_have_the_same_rows_and_codes() -> None:
    english, chinese = (rows_of(page.read_text(encoding="utf-8")) for page in PAGES)
    assert list(english) == list(chinese)
    codes = [
        [re.findall(r"\d+", cells[-1]) for row, cells in rows.items() if row[0] != "E"] for rows in (english, chinese)
    ]
    assert codes[0] == codes[1]


def test_every_mistake_of_the_list_is_planted() -> None:
    mistakes = HELD_BY["mistakes"]
    assert len(mistakes) == MISTAKES and all(mistakes.values())
    assert {name for names in mistakes.values() for name in names} <= {mutant.name for mutant in MUTANTS}

"""docs/reliability.md: every row has tests, listed in tests/reliability/held_by.toml."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / "reliability.md", ROOT / "docs" / "zh" / "reliability.md"]
TESTS: dict[str, list[str]] = tomllib.loads((ROOT / "tests" / "reliability" / "held_by.toml").read_text("utf-8"))
"""Row of the page -> its tests as ``file::function``."""


def read_rows(page: Path) -> dict[str, list[str]]:
    """Return the cells of each numbered row by its number."""
    lines = page.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    rows = [row for row in cells if re.fullmatch(r"[A-Z]\d\d", row[0])]
    assert len({row[0] for row in rows}) == len(rows), f"{page.name} has a number twice"
    return {row[0]: row for row in rows}


@functools.cache
def read_test_functions(file: Path) -> dict[str, bool]:
    """Return the test functions of a file, True for slow ones; the file is parsed, not imported."""
    if not file.exists():
        return {}
    functions = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    return {
        function.name: any(ast.unparse(mark) == "pytest.mark.slow" for mark in function.decorator_list)
        for function in functions
    }


def test_every_row_has_existing_fast_test() -> None:
    assert TESTS.keys() == read_rows(PAGES[0]).keys()
    for row, tests in TESTS.items():
        is_slow = {}
        for test in tests:
            file, _, name = test.partition("::")
            functions = read_test_functions(ROOT / file)
            assert name in functions, f"{row}: {test} does not exist"
            is_slow[test] = functions[name]
        assert not all(is_slow.values()), f"{row} has slow tests only"


def test_pages_have_equal_rows_and_exit_codes() -> None:
    english, chinese = map(read_rows, PAGES)
    assert list(english) == list(chinese)
    codes = [
        [re.findall(r"\d+", cells[-1]) for row, cells in rows.items() if row[0] != "E"] for rows in (english, chinese)
    ]
    assert codes[0] == codes[1]

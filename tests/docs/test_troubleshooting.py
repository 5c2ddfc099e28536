"""docs/troubleshooting.md: each message that it quotes is one that the code can say."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from megatron.errors import EXIT_CODES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / "troubleshooting.md", ROOT / "docs" / "zh" / "troubleshooting.md"]
MIN_LETTERS = 9
"""Letters of the longest fragment of a message, so that it says something."""

every_page = pytest.mark.parametrize("page", PAGES, ids=["english", "chinese"])


@functools.cache
def source_strings() -> tuple[str, ...]:
    """Return the strings of the source, with a line feed in place of each formatted value."""
    strings: set[str] = set()
    for folder in ("megatron", "tds"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            strings |= {_template(node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))}
    return tuple(text for text in strings if text and len(text) >= MIN_LETTERS)


def _template(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(value.value if isinstance(value, ast.Constant) else "\n" for value in node.values)
    return ""


def read_messages(page: Path) -> list[str]:
    """Return the first cells of the tables whose first column is "message"."""
    sections = re.split(r"^\| (?:message|报错) \|.*\n\|[-|]+\|\n", page.read_text(encoding="utf-8"), flags=re.M)[1:]
    tables = [section.split("\n\n")[0] for section in sections]
    return [row.split("`")[1] for table in tables for row in table.splitlines() if row.startswith("| `")]


def is_in_source(message: str) -> bool:
    """Return whether some text of the source has the fragments of ``message`` in their order."""
    fragments = [fragment.strip() for fragment in message.split("...") if fragment.strip()]
    assert max(map(len, fragments)) >= MIN_LETTERS, f"{message}: too short to be found"
    pattern = re.compile(".*".join(map(re.escape, fragments)), re.S)
    longest = max(fragments, key=len)
    return any(longest in text and pattern.search(text) for text in source_strings())


@every_page
def test_documented_messages_are_in_source(page: Path) -> None:
    documented = read_messages(page)
    assert documented and len(set(documented)) == len(documented)
    assert [message for message in documented if not is_in_source(message)] == []


def test_unknown_message_is_not_found() -> None:
    assert not is_in_source("the loss must be pretty, got ...")
    assert not is_in_source("got ... the loss must be finite")


@every_page
def test_pages_have_equal_messages_and_exit_codes(page: Path) -> None:
    assert read_messages(page) == read_messages(PAGES[0])
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", page.read_text(encoding="utf-8"), flags=re.M)}
    assert codes == {1, *EXIT_CODES.values()}

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
LEAST = 9
"""Letters of the longest piece of a message, so that it says something."""

every_page = pytest.mark.parametrize("page", PAGES, ids=["english", "chinese"])


@functools.cache
def texts() -> tuple[str, ...]:
    """Return the strings of the source, with a line feed in place of each formatted value."""
    found: set[str] = set()
    for folder in ("megatron", "tds"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found |= {_template(node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))}
    return tuple(text for text in found if text and len(text) >= LEAST)


def _template(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "\n" for part in node.values)
    return ""


def messages(page: Path) -> list[str]:
    """Return the first cells of the tables whose first column is "message"."""
    parts = re.split(r"^\| (?:message|报错) \|.*\n\|[-|]+\|\n", page.read_text(encoding="utf-8"), flags=re.M)[1:]
    tables = [part.split("\n\n")[0] for part in parts]
    return [row.split("`")[1] for table in tables for row in table.splitlines() if row.startswith("| `")]


def occurs(message: str) -> bool:
    """Return whether some text of the source has the pieces of ``message`` in their order."""
    pieces = [piece.strip() for piece in message.split("...") if piece.strip()]
    assert max(map(len, pieces)) >= LEAST, f"{message}: too short to be found"
    pattern = re.compile(".*".join(map(re.escape, pieces)), re.S)
    longest = max(pieces, key=len)
    return any(longest in text and pattern.search(text) for text in texts())


@every_page
def test_each_message_is_in_the_source(page: Path) -> None:
    documented = messages(page)
    assert documented and len(set(documented)) == len(documented)
    assert [message for message in documented if not occurs(message)] == []


def test_a_message_that_nobody_says_is_found_out() -> None:
    assert not occurs("the loss must be pretty, got ...")
    assert not occurs("got ... the loss must be finite")


@every_page
def test_both_pages_have_the_messages_and_the_exit_codes(page: Path) -> None:
    assert messages(page) == messages(PAGES[0])
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", page.read_text(encoding="utf-8"), flags=re.M)}
    assert codes == {1, *EXIT_CODES.values()}

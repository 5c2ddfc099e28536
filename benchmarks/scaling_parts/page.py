"""The sections of docs/scaling.md that the benchmark writes, between marks; the rest of the page is written by hand."""

from __future__ import annotations

from pathlib import Path


def replaced(text: str, name: str, section: str) -> str:
    """Return ``text`` with what lies between the marks of ``name`` replaced by ``section``.

    Raises:
        ValueError: the marks are not there once each, in their order.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the page must have {begin} and then {end} once each. Put them where the section belongs")
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n\n{section.strip()}\n\n{end}{tail}"


def update(page: Path, name: str, section: str) -> None:
    """Write ``section`` into the page.

    Raises:
        ValueError: as ``replaced``.
    """
    page.write_text(replaced(page.read_text(encoding="utf-8"), name, section), encoding="utf-8")

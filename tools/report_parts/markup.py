"""HTML from text: everything that comes from a run is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


class Html(str):
    """Text that is HTML already."""


def html(value: Any) -> Html:
    """Return ``value`` as HTML: escaped, unless it is HTML already."""
    return value if isinstance(value, Html) else Html(escape("" if value is None else str(value)))


def tag(name: str, *within: Any, **attributes: Any) -> Html:
    """Return an element; ``class_`` is the attribute class, and True an attribute without a value."""
    told = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{told}>{joined(within)}</{name}>")


def joined(parts: Iterable[Any], between: str = "") -> Html:
    """Return all parts, one after another."""
    return Html(between.join(html(part) for part in parts))


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], **attributes: Any) -> Html:
    """Return a table that scrolls by itself where it is too wide; a cell that is HTML of a cell stays one."""
    body = [tag("tr", *[_cell(cell) for cell in row]) for row in rows]
    inner = joined([tag("thead", tag("tr", *[tag("th", cell) for cell in head])), tag("tbody", *body)])
    return tag("div", tag("table", inner, **attributes), class_="scroll")


def section(title: str | Html, *within: Any, id_: str, is_open: bool = True) -> Html:
    """Return a part of the page that can be folded."""
    return tag("details", tag("summary", tag("h2", title)), *within, class_="card", id=id_, open=is_open)


def _cell(value: Any) -> Html:
    return value if isinstance(value, Html) and value.startswith("<td") else tag("td", value)

"""A stream as text: documents under headings, what has no loss in brackets, and a table of its tokens.

Colours are added to that where the console shows them; nothing is told by them alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron.data.inspect.stream import PADDING, Section, Stream, sections
from megatron.data.inspect.words import Words

_HEADING, _CONTROL, _NO_LOSS = "bold yellow", "cyan", "red"
_SHOWN_ONE_BY_ONE = 2


def show(stream: Stream, words: Words, console: Console, num_rows: int) -> None:
    """Print the text of ``stream`` and, where it has labels, the table of ``table``."""
    console.print(Text(f"{stream.title}, {len(stream.tokens)} tokens", style="bold"))
    for section in sections(stream):
        console.print(Text(heading(stream, section), style=_HEADING), soft_wrap=True)
        console.print(text(stream, section, words), soft_wrap=True)
    if stream.labels is not None and num_rows:
        console.print(table(stream, words, num_rows))


def heading(stream: Stream, section: Section) -> str:
    """Return the line above a document: which tokens it is, their positions, and whether it stands apart."""
    start, stop, number = section
    name = "padding" if number == PADDING else f"document {number}"
    told = [f"---- {name}: tokens {start}-{stop - 1}"]
    if stream.positions is not None and number != PADDING:
        told.append(f"positions {stream.positions[start]}-{stream.positions[stop - 1]}")
    if number != PADDING and (number or stop < len(stream.tokens)):
        told.append("kept apart" if stream.documents is not None else "not kept apart from the others")
    return ", ".join(told)


def text(stream: Stream, section: Section, words: Words) -> Text:
    """Return the tokens of a section: decoded, control tokens by name, ``[no loss: ...]`` around those without it."""
    shown = Text()
    for start, stop, has_loss in _by_loss(stream, section):
        part = _decoded(stream.tokens[start:stop], words)
        if has_loss:
            shown.append_text(part)
        else:
            shown.append_text(Text.assemble("[no loss: ", part, "]", style=_NO_LOSS))
    return shown


def _by_loss(stream: Stream, section: Section) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, stop, has loss) of runs of tokens that are alike in that."""
    has_loss = np.ones(len(stream.tokens), np.bool_) if stream.has_loss is None else stream.has_loss
    own = has_loss[section.start : section.stop]
    cuts = [0, *(np.flatnonzero(own[1:] != own[:-1]) + 1).tolist(), len(own)]
    for start, stop in zip(cuts, cuts[1:], strict=False):
        yield section.start + start, section.start + stop, bool(own[start])


def _decoded(tokens: np.ndarray, words: Words) -> Text:
    shown = Text()
    for start, stop in _by_control(tokens, words):
        if not words.is_control(int(tokens[start])):
            shown.append(words.text(tokens[start:stop]))
            continue
        name, count = words.name(int(tokens[start])), stop - start
        shown.append(name * count if count <= _SHOWN_ONE_BY_ONE else f"{name} x {count}", style=_CONTROL)
    return shown


def _by_control(tokens: np.ndarray, words: Words) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of runs: of ordinary text, or of one control token."""
    keys = [int(token) if words.is_control(int(token)) else -1 for token in tokens]
    start = 0
    for place in range(1, len(keys) + 1):
        if place == len(keys) or keys[place] != keys[start]:
            yield start, place
            start = place


def table(stream: Stream, words: Words, num_rows: int) -> Table:
    """Return a row for each of the first ``num_rows`` tokens, for the last one, and for those beside a change of
    document or loss."""
    assert stream.labels is not None
    columns = {"input": stream.tokens, "label": stream.labels}
    facts = {"loss": stream.has_loss, "position": stream.positions, "document": stream.documents}
    others = {name: values for name, values in facts.items() if values is not None}
    shown = Table(title=f"{stream.title}, token by token", title_justify="left")
    for name in ("token", *columns, *others):
        shown.add_column(name, justify="left" if name in columns else "right", overflow="fold")
    before = -1
    for place in _places(stream, num_rows):
        if place != before + 1:
            shown.add_row(*["..."] * len(shown.columns))
        cells = [f"{values[place]} {words.short(int(values[place]))}" for values in columns.values()]
        more = [str(int(values[place])) for values in others.values()]
        shown.add_row(str(place), *map(Text, cells), *more)
        before = place
    return shown


def _places(stream: Stream, num_rows: int) -> list[int]:
    count = len(stream.tokens)
    changes = [section.start for section in sections(stream)]
    changes += [start for section in sections(stream) for start, _, _ in _by_loss(stream, section)]
    beside = {place for start in changes for place in (start - 1, start)}
    return sorted({*range(min(num_rows, count)), *(place for place in beside if place >= 0), count - 1})

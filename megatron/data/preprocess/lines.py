"""Cutting blocks of bytes into records: lines, texts between blank lines, whole files.

A record belongs to the unit in which it begins, wherever the borders of units fall: a line by its first byte, a text
between blank lines by the first byte of the last blank line before it. So no unit has to know what lies before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from megatron.data.preprocess.blocks import blocks
from megatron.data.preprocess.openings import BOM, HEAD_BYTES, check_is_lines
from megatron.data.preprocess.records import Record, Unit
from megatron.errors import DataError

_LONGEST_LINE = 1 << 30


def lines(unit: Unit) -> Iterator[Record]:
    """Yield the lines that begin in [unit.start, unit.stop), without their line feeds; blank ones too."""
    for batch, _ in _batches(unit):
        if batch[-1].byte_offset >= unit.stop:
            yield from (record for record in batch if record.byte_offset < unit.stop)
            return
        yield from batch


def texts_between_blank_lines(unit: Unit) -> Iterator[Record]:
    """Yield what stands between blank lines, with its line ends, as far as it is the unit's."""
    text: list[bytes] = []
    place: Record | None = None
    is_ours = not unit.start  # no blank line stands before the first text of a file
    for record, is_ended in ((record, are_ended) for batch, are_ended in _batches(unit) for record in batch):
        data = record.data.removeprefix(BOM)  # `cat` leaves that of a file in the middle
        if data and not data.isspace():
            if is_ours:
                place = place or record
                text += (data, b"\n") if is_ended else (data,)
        else:
            if place:
                yield place._replace(data=b"".join(text))
            text, place, is_ours = [], None, True
        if record.byte_offset >= unit.stop and not place:
            return
    if place:
        yield place._replace(data=b"".join(text))


def whole_files(unit: Unit) -> Iterator[Record]:
    """Yield each file of the unit as one record."""
    for path in unit.paths:
        data = b"".join(blocks(path))
        start = len(BOM) if data.startswith(BOM) else 0
        yield Record(path, 1, start, data[start:].replace(b"\n" + BOM, b"\n"))


def _batches(unit: Unit) -> Iterator[tuple[list[Record], bool]]:
    """Yield the lines that begin at ``unit.start`` or later, until the file ends, and whether line feeds end them.

    Lines are counted where the reading begins with the file.
    """
    path = unit.path
    make = tuple.__new__  # a third of the time that Record(...) takes, which matters for short lines
    offset, stream = _first_line(unit)
    line, step = (0, 0) if unit.start else (1, 1)
    for cut, are_ended in _cut(path, stream):
        batch = []
        for data in cut:
            batch.append(make(Record, (path, line, offset, data)))
            offset += len(data) + 1
            line += step
        yield batch, are_ended


def _first_line(unit: Unit) -> tuple[int, Iterator[bytes]]:
    """Return where the unit's first line begins, and what follows from there."""
    if not unit.start:
        stream = blocks(unit.path)
        head = next(stream, b"")
        if unit.format == "jsonl":
            check_is_lines(unit.path, head[:HEAD_BYTES])
        start = len(BOM) if head.startswith(BOM) else 0
        return start, chain([head[start:]], stream)
    place = unit.start - 1
    stream = blocks(unit.path, place)
    for block in stream:
        if (found := block.find(b"\n")) >= 0:
            return place + found + 1, chain([block[found + 1 :]], stream)
        place += len(block)
        if place >= unit.stop:
            break
    return unit.stop, iter(())


def _cut(path: str, stream: Iterator[bytes]) -> Iterator[tuple[list[bytes], bool]]:
    """Yield lines as they are complete, many at a time, then what follows the last line feed, if anything does."""
    rest: list[bytes] = []
    size = 0
    for block in stream:
        *ended, last = block.split(b"\n")
        if ended:
            ended[0] = b"".join([*rest, ended[0]])
            rest, size = [], 0  # before the yield: while a giant line is used, its pieces must not lie beside it
            yield ended, True
        rest.append(last)
        size += len(last)
        if size > _LONGEST_LINE:
            raise DataError(
                f"--input {path} must have lines of at most {_LONGEST_LINE} bytes, got a longer one; "
                "if it is one large JSON array, write each element on a line of its own: jq -c '.[]'"
            )
    if size:
        yield [b"".join(rest)], False

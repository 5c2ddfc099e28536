"""The line numbers of bad records: a unit that begins within a file does not know them, the few bad ones can ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron.data.preprocess.blocks import blocks
from megatron.data.preprocess.records import BadRecord
from megatron.errors import DataError


def with_line_numbers(bad: Sequence[BadRecord]) -> list[BadRecord]:
    """Return ``bad`` in its order with the lines that nobody has counted, each file read once up to its last bad one.

    A file that cannot be read any more leaves the lines at 0.
    """
    wanted: dict[str, set[int]] = {}
    for record in bad:
        if not record.line:
            wanted.setdefault(record.path, set()).add(record.byte_offset)
    found = {path: _lines_at(path, sorted(offsets)) for path, offsets in wanted.items()}
    return [
        record if record.line else replace(record, line=found[record.path].get(record.byte_offset, 0)) for record in bad
    ]


def _lines_at(path: str, offsets: list[int]) -> dict[int, int]:
    """Return the line that begins at each of ``offsets``, which rise."""
    found: dict[int, int] = {}
    line, place, following = 1, 0, iter(offsets)
    offset = next(following)
    try:
        for block in blocks(path):
            counted = 0
            while offset - place < len(block):
                line += block.count(b"\n", counted, offset - place)
                counted = offset - place
                found[offset] = line
                if (offset := next(following, -1)) < 0:
                    return found
            line += block.count(b"\n", counted)
            place += len(block)
    except DataError:
        pass
    return found

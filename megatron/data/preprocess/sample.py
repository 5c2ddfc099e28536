"""A sample of a corpus, spread evenly over its bytes: for training a vocabulary on what fits into memory.

Of a file that can be read from any byte only the sample is read: pieces of 64 kB of text at even distances. Compressed
files are read through and a document is taken whenever the sample has fallen behind its share. How much a compressed
file holds is estimated from its first 8 MB; of parquet the column's bytes count. All of it follows from
the files alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.data.preprocess import parquet
from megatron.data.preprocess.compressed import unpacked_size
from megatron.data.preprocess.records import STDIN, BadRecord, Unit, compression_of
from megatron.data.preprocess.units import plan_units, unit_documents
from megatron.errors import DataError

PIECE_BYTES = 1 << 16


class Drawn(NamedTuple):
    """A document of the sample, or a bad record; the file that it is from; the bytes of the file that it stands for."""

    path: str
    text: str | BadRecord
    passed_bytes: int


def sample(
    paths: Sequence[Path | str], format: str | None, keys: Sequence[str], num_bytes: int | None = None
) -> Iterator[Drawn]:
    """Yield documents of about ``num_bytes`` of UTF-8 text in the order of the corpus, or all of it.

    Raises:
        DataError: as ``plan_units`` and ``read_unit``; or standard input is to be sampled, whose size nobody knows.
    """
    units = plan_units(paths, format, unit_bytes=sys.maxsize)
    if num_bytes is None:
        for unit in units:
            yield from _documents(unit, keys)
        return
    if any(unit.path == STDIN for unit in units):
        raise DataError("--sample-bytes needs files, for it spreads the sample over their size; got standard input (-)")
    share = min(1.0, num_bytes / max(sum(_text_bytes(unit, keys) for unit in units), 1))
    distance = PIECE_BYTES / max(share, 1 / sys.maxsize)
    yield from _evenly(plan_units(paths, format, unit_bytes=int(min(distance, sys.maxsize)) + 1), keys, share)


def _evenly(units: Sequence[Unit], keys: Sequence[str], share: float) -> Iterator[Drawn]:
    """Take documents while fewer bytes are taken than are due: ``share`` of those that were passed."""
    taken, due = 0, 0.0
    for unit in units:
        is_read_through = compression_of(unit.path) is not None or unit.format == "parquet"
        if not is_read_through:  # its first documents stand for all of it
            due += share * unit.size
        for drawn in _documents(unit, keys) if is_read_through or taken < due else ():
            if is_read_through:
                due += share * drawn.passed_bytes
            if isinstance(drawn.text, BadRecord):
                yield drawn
            elif taken < due:
                taken += len(drawn.text.encode())
                yield drawn
            if not is_read_through and taken >= due:
                break


def _documents(unit: Unit, keys: Sequence[str]) -> Iterator[Drawn]:
    for record, text in unit_documents(unit, keys):
        if unit.format == "parquet" and isinstance(text, str):  # the JSON around the text is not in the file
            yield Drawn(record.path, text, len(text.encode()))
        else:
            yield Drawn(record.path, text, len(record.data))


def _text_bytes(unit: Unit, keys: Sequence[str]) -> int:
    """Return how many bytes the unit has when it is unpacked, those of ``keys`` alone where they lie apart."""
    if unit.format == "parquet":
        return parquet.column_bytes(unit, keys)
    return unpacked_size(unit.path) if compression_of(unit.path) else unit.size

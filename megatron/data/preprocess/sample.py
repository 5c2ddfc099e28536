"""A sample of a corpus, spread evenly over its bytes: for training a vocabulary on what fits into memory.

Of a file that can be read from any byte only the sample is read: pieces of 64 kB of text at even distances. Compressed
files are read through and a document is taken whenever the sample has fallen behind its share. How much a compressed
file holds is estimated from its first 8 MB; of parquet the column's bytes count. All of it follows from the files alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.data.preprocess import parquet
from megatron.data.preprocess.compressed import unpacked_size
from megatron.data.preprocess.documents import parse
from megatron.data.preprocess.records import STDIN, BadRecord, Unit, compression_of, is_whole
from megatron.data.preprocess.units import plan_units, read_unit
from megatron.errors import DataError

PIECE_BYTES = 1 << 16


class Drawn(NamedTuple):
    """A document of the sample, or a bad record, and the file that it is from."""

    path: str
    text: str | BadRecord


def sample(
    paths: Sequence[Path | str], format: str | None, keys: Sequence[str], num_bytes: int | None = None
) -> Iterator[Drawn]:
    """Yield documents of about ``num_bytes`` of UTF-8 text in the order of the corpus, or all of it.

    The sample is larger by less than a document, and smaller only where the corpus does not hold so much text.

    Raises:
        DataError: as ``plan_units`` and ``read_unit``; or standard input is to be sampled, whose size nobody knows.
    """
    units = plan_units(paths, format, unit_bytes=1 << 62)
    if num_bytes is None:
        for unit in units:
            yield from _documents(unit, keys)
        return
    if any(unit.path == STDIN for unit in units):
        raise DataError("--sample-bytes needs files, for it spreads the sample over their size; got standard input (-)")
    sizes = [_text_bytes(unit, keys) for unit in units]
    share = min(1.0, num_bytes / max(sum(sizes), 1))
    distance = int(PIECE_BYTES / max(share, 1e-9)) + 1
    cut = plan_units(paths, format, unit_bytes=distance)
    yield from _evenly(cut, keys, share)


def _evenly(units: Sequence[Unit], keys: Sequence[str], share: float) -> Iterator[Drawn]:
    """Take documents as long as fewer bytes were taken than the share of those that were passed."""
    taken, due = 0, 0.0
    for unit in units:
        is_read_through = is_whole(unit.path, unit.format) or unit.format == "parquet"
        due += 0 if is_read_through else share * unit.size
        for drawn in _documents(unit, keys):
            ...

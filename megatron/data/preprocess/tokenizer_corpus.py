"""An even sample of a corpus for training a vocabulary."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.data.preprocess import arrow_files, readers
from megatron.data.preprocess.corpus import plan_units, unit_documents
from megatron.data.preprocess.job_types import STDIN, TABLES, BadRecord, Unit, compression_of
from megatron.data.preprocess.readers import unpacked_size
from megatron.errors import DataError

# A sample of a corpus, spread evenly over its bytes: for training a vocabulary on what fits into memory.
#
# Of a file that can be read from any byte only the sample is read: pieces of 64 kB of text at even distances.
# Compressed files are read through and a document is taken whenever the sample has fallen behind its share. How much a
# compressed file holds is estimated from its first 8 MB; of tables the column's bytes count. All of it follows from
# the files alone.

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
        is_read_through = compression_of(unit.path) is not None or unit.format in TABLES
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
        if unit.format in TABLES and isinstance(text, str):  # the JSON around the text is not in the file
            yield Drawn(record.path, text, len(text.encode()))
        else:
            yield Drawn(record.path, text, len(record.data))


def _text_bytes(unit: Unit, keys: Sequence[str]) -> int:
    """Return how many bytes the unit has when it is unpacked, those of ``keys`` alone where they lie apart."""
    if unit.format in TABLES:
        return (readers if unit.format == "parquet" else arrow_files).column_bytes(unit, keys)
    return unpacked_size(unit.path) if compression_of(unit.path) else unit.size


# The text that a vocabulary is trained on: a stream of documents, of which a few are kept apart to measure it.

HELD_OUT_STEP = 1 << 14
_MOST_KEPT_BYTES = 1 << 24
_BAD_SHOWN = 20
_MOST_BAD_LISTED = 10_000
_GIVE_UP_AT = 1000
"""Bad records after which reading stops if they are the majority: the input or a flag is wrong, not single lines."""


class TrainingText:
    """The documents of ``drawn`` without those that are kept apart; can be gone through once.

    A document is kept apart whenever those of its group are 16 kB behind their share of the bytes so far, up to 16 MB
    in all. So they lie at even distances and are neither longer nor shorter than others; a small text gives none.

    Args:
        group_of: names the group of a document by the file that it is from.
        max_bad_lines: number of bad records that are left out without an error; None: 0, or no limit of its own with
            ``max_bad_fraction``.
        max_bad_fraction: the same as a fraction of all records with text.

    Raises:
        DataError: at the end of the text, if more records are bad, or if there is no document at all.
    """

    def __init__(
        self, drawn: Iterable[Drawn], group_of: Callable[[str], str], held_out_share: float,
        max_bad_lines: int | None = None, max_bad_fraction: float | None = None,
    ) -> None:  # fmt: skip
        self._drawn, self._group_of = drawn, group_of
        self._share, self._max_bad_fraction = held_out_share, max_bad_fraction
        self._max_bad_lines = 0 if max_bad_lines is None and max_bad_fraction is None else max_bad_lines
        self._seen: dict[str, int] = defaultdict(int)
        self._held: dict[str, int] = defaultdict(int)
        self.held_out: dict[str, list[str]] = {}
        """The documents kept apart, by group."""
        self.bad: list[BadRecord] = []
        """The bad records, the first 10,000 of them."""
        self.num_documents = self.num_bytes = self.num_bad = 0

    def __iter__(self) -> Iterator[str]:
        for path, text, _ in self._drawn:
            if isinstance(text, BadRecord):
                self.num_bad += 1
                self.bad += [text][: _MOST_BAD_LISTED - len(self.bad)]
                if self.num_bad >= _GIVE_UP_AT and self.num_bad > self.num_documents:
                    self._check_bad(", and reading stopped there")
            elif not self._hold_out(self._group_of(path), text):
                yield text
        self._check_bad()
        if not self.num_documents:
            raise DataError(f"there must be documents to train on, got none ({self.num_bad} bad); check --input")

    def _hold_out(self, group: str, text: str) -> bool:
        size = len(text.encode())
        self.num_documents += 1
        self.num_bytes += size
        self._seen[group] += size
        is_due = self._share * self._seen[group] - self._held[group] >= HELD_OUT_STEP
        if not is_due or sum(self._held.values()) + size > _MOST_KEPT_BYTES:
            return False
        self._held[group] += size
        self.held_out.setdefault(group, []).append(text)
        return True

    def _check_bad(self, end: str = "") -> None:
        """Raise DataError if too many records are bad.

        Args:
            end: why reading ended, for the message.
        """
        num_records = self.num_documents + self.num_bad
        allowed = []
        if self._max_bad_lines is not None and self.num_bad > self._max_bad_lines:
            allowed.append(f"{self._max_bad_lines} (--max-bad-lines)")
        if self._max_bad_fraction is not None and self.num_bad > self._max_bad_fraction * num_records:
            allowed.append(f"{self._max_bad_fraction:g} of all lines (--max-bad-fraction)")
        if not allowed:
            return
        shown = "".join(f"\n  {record}" for record in self.bad[:_BAD_SHOWN])
        more = f"\n  and {self.num_bad - _BAD_SHOWN} more" if self.num_bad > _BAD_SHOWN else ""
        fix = f"leave them out with --max-bad-lines {self.num_bad}"
        if end:
            fix = "check --input, --format and --json-key"
        raise DataError(
            f"{self.num_bad} of {num_records} records are bad{end}; at most {' and '.join(allowed)} may be. "
            f"Correct them, or {fix}:{shown}{more}"
        )

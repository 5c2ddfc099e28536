"""An evenly distributed corpus sample for training a vocabulary."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.data.preprocess import arrow_files, readers
from megatron.data.preprocess.corpus import plan_units, unit_documents
from megatron.data.preprocess.job_types import STDIN, TABLES, BadRecord, Unit, compression_type
from megatron.data.preprocess.readers import estimate_unpacked_size
from megatron.errors import DataError

# A corpus sample, evenly distributed over its bytes, so that a vocabulary can be trained in memory.
#
# For a file that can be read from any byte, only the sample is read: evenly spaced 64 kB text blocks. Compressed
# files are read completely, and a document is selected whenever the sample has fallen behind its share. A compressed
# file's size is estimated from its first 8 MB; for tables, the text columns' size counts. The sample depends only
# on the files.

SAMPLE_CHUNK_BYTES = 1 << 16


class SampledDocument(NamedTuple):
    """A sampled document or a bad record, with its file and the bytes that it occupies in the file."""

    path: str
    text: str | BadRecord
    passed_bytes: int


def sample(
    paths: Sequence[Path | str], format: str | None, keys: Sequence[str], num_bytes: int | None = None
) -> Iterator[SampledDocument]:
    """Sample documents with about ``num_bytes`` of UTF-8 text (None: all documents) in corpus order.

    Raises:
        DataError: see ``plan_units`` and ``read_unit``; or standard input, whose size is unknown, would be sampled.
    """
    units = plan_units(paths, format, unit_bytes=sys.maxsize)
    if num_bytes is None:
        for unit in units:
            yield from _documents(unit, keys)
        return
    if any(unit.path == STDIN for unit in units):
        raise DataError("--sample-bytes needs files of known size, got standard input (-)")
    share = min(1.0, num_bytes / max(sum(_text_bytes(unit, keys) for unit in units), 1))
    distance = SAMPLE_CHUNK_BYTES / max(share, 1 / sys.maxsize)
    yield from _sample_evenly(plan_units(paths, format, unit_bytes=int(min(distance, sys.maxsize)) + 1), keys, share)


def _sample_evenly(units: Sequence[Unit], keys: Sequence[str], share: float) -> Iterator[SampledDocument]:
    """Yield a document whenever the sample is smaller than ``share`` of the bytes passed so far.

    Bad records that are read are also yielded.
    """
    num_sampled_bytes, num_due_bytes = 0, 0.0
    for unit in units:
        is_read_fully = compression_type(unit.path) is not None or unit.format in TABLES
        if not is_read_fully:  # read only the first documents, as a sample of the unit
            num_due_bytes += share * unit.size
        for document in _documents(unit, keys) if is_read_fully or num_sampled_bytes < num_due_bytes else ():
            if is_read_fully:
                num_due_bytes += share * document.passed_bytes
            if isinstance(document.text, BadRecord):
                yield document
            elif num_sampled_bytes < num_due_bytes:
                num_sampled_bytes += len(document.text.encode())
                yield document
            if not is_read_fully and num_sampled_bytes >= num_due_bytes:
                break


def _documents(unit: Unit, keys: Sequence[str]) -> Iterator[SampledDocument]:
    for record, text in unit_documents(unit, keys):
        if unit.format in TABLES and isinstance(text, str):  # the JSON around the text was added by the reader
            yield SampledDocument(record.path, text, len(text.encode()))
        else:
            yield SampledDocument(record.path, text, len(record.data))


def _text_bytes(unit: Unit, keys: Sequence[str]) -> int:
    """Measure the unit's decompressed bytes; for tables, only the columns ``keys`` count."""
    if unit.format in TABLES:
        return (readers if unit.format == "parquet" else arrow_files).column_bytes(unit, keys)
    return estimate_unpacked_size(unit.path) if compression_type(unit.path) else unit.size


# Training text for a vocabulary: a document stream; some documents are held out to evaluate the vocabulary.

HELD_OUT_STEP = 1 << 14
_MAX_HELD_OUT_BYTES = 1 << 24
_MAX_EXAMPLES = 20
_MAX_BAD_RECORDS = 10_000
_STOP_AT_NUM_BAD = 1000
"""Number of bad records at which reading stops if they are the majority, as the input or a flag is probably wrong."""


class TrainingText:
    """The ``documents`` except the held-out ones; can be iterated once.

    The target for each group is ``held_out_share`` of its bytes read so far. A document is held out when the held-out
    bytes of its group are 16 kB or more below the target, and at most 16 MB are held out in total. Held-out documents
    are therefore evenly distributed and have typical lengths. A small text has no held-out documents.

    Args:
        group_of: returns a document's group from its file path.
        held_out_share: share of each group's bytes to hold out.
        max_bad_lines: bad records that are skipped without an error; None: 0, or unlimited if
            ``max_bad_fraction`` is given.
        max_bad_fraction: the same limit as a fraction of all records with text.

    Raises:
        DataError: at the end of the text, if there are too many bad records or no documents.
    """

    def __init__(
        self, documents: Iterable[SampledDocument], group_of: Callable[[str], str], held_out_share: float,
        max_bad_lines: int | None = None, max_bad_fraction: float | None = None,
    ) -> None:  # fmt: skip
        self._documents, self._group_of = documents, group_of
        self._share, self._max_bad_fraction = held_out_share, max_bad_fraction
        self._max_bad_lines = 0 if max_bad_lines is None and max_bad_fraction is None else max_bad_lines
        self._num_read_bytes: dict[str, int] = defaultdict(int)
        self._num_held_out_bytes: dict[str, int] = defaultdict(int)
        self.held_out: dict[str, list[str]] = {}
        """Group -> held-out documents."""
        self.bad: list[BadRecord] = []
        """The first 10,000 bad records."""
        self.num_documents = self.num_bytes = self.num_bad = 0

    def __iter__(self) -> Iterator[str]:
        for path, text, _ in self._documents:
            if isinstance(text, BadRecord):
                self.num_bad += 1
                self.bad += [text][: _MAX_BAD_RECORDS - len(self.bad)]
                if self.num_bad >= _STOP_AT_NUM_BAD and self.num_bad > self.num_documents:
                    self._check_bad(", and reading was stopped")
            elif not self._hold_out(self._group_of(path), text):
                yield text
        self._check_bad()
        if not self.num_documents:
            raise DataError(f"there are no documents to train on ({self.num_bad} bad). Check --input")

    def _hold_out(self, group: str, text: str) -> bool:
        size = len(text.encode())
        self.num_documents += 1
        self.num_bytes += size
        self._num_read_bytes[group] += size
        is_due = self._share * self._num_read_bytes[group] - self._num_held_out_bytes[group] >= HELD_OUT_STEP
        if not is_due or sum(self._num_held_out_bytes.values()) + size > _MAX_HELD_OUT_BYTES:
            return False
        self._num_held_out_bytes[group] += size
        self.held_out.setdefault(group, []).append(text)
        return True

    def _check_bad(self, reason: str = "") -> None:
        """Raise DataError if too many records are bad.

        Args:
            reason: text for the message that states why reading stopped.
        """
        num_records = self.num_documents + self.num_bad
        exceeded = []
        if self._max_bad_lines is not None and self.num_bad > self._max_bad_lines:
            exceeded.append(f"{self._max_bad_lines} (--max-bad-lines)")
        if self._max_bad_fraction is not None and self.num_bad > self._max_bad_fraction * num_records:
            exceeded.append(f"{self._max_bad_fraction:g} of all lines (--max-bad-fraction)")
        if not exceeded:
            return
        examples = "".join(f"\n  {record}" for record in self.bad[:_MAX_EXAMPLES])
        remaining = f"\n  and {self.num_bad - _MAX_EXAMPLES} more" if self.num_bad > _MAX_EXAMPLES else ""
        fix = f"skip them with --max-bad-lines {self.num_bad}"
        if reason:
            fix = "check --input, --format and --json-key"
        raise DataError(
            f"{self.num_bad} of {num_records} records are bad{reason}; at most {' and '.join(exceeded)} are allowed. "
            f"Correct them, or {fix}:{examples}{remaining}"
        )

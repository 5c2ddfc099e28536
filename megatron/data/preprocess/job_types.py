"""Job, Unit, Record, Counts, Summary: what the files of this package hand to each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.tokenizer import Tokenizer

# What reading a corpus gives: units of work, records of raw bytes, and records that are of no use.

TABLES = ("parquet", "arrow")
"""Formats with one document per row; a unit is a range of row groups or record batches."""

FORMATS = ("jsonl", "text-file", "text-block", *TABLES)
"""One JSON object per line; one document per file; documents between blank lines; one document per row."""

STDIN = "-"
"""The path that stands for standard input."""

ROWS = -1
"""``Record.line`` of a row of a parquet or Arrow file, whose position is a row number, not a byte."""


class Record(NamedTuple):
    """Bytes of one document, or of the JSON that holds it, and where they are.

    Args:
        path: the file, ``-`` for standard input.
        line: from 1; 0 where nobody has counted (a unit that begins within a file); ROWS for a row of a table.
        byte_offset: where ``data`` begins in the (decompressed) file; of a table the number of the row in the file.
    """

    path: str
    line: int
    byte_offset: int
    data: bytes


@dataclass(frozen=True)
class Unit:
    """A part of the corpus that is read in one go, by whichever process.

    Args:
        number: place among all units; documents of a corpus are in the order of its units, then of the records in them.
        path: the file, ``-`` for standard input.
        start, stop: the unit holds the documents that begin at these bytes; row groups of parquet, record
            batches of Arrow; the whole file
            where it is read from its beginning only (compressed, a document per file, standard input).
        size: bytes on the disk, for the progress; 0 for standard input.
        more: further small files that are read whole after ``path``, so that a million of them are not a million units.
    """

    number: int
    path: str
    format: str
    start: int
    stop: int
    size: int
    more: tuple[str, ...] = ()

    def name(self) -> str:
        """Return how messages call the unit."""
        if self.path == STDIN:
            return "standard input"
        if self.more:
            return f"{self.path} and {len(self.more)} more files"
        if self.format in TABLES:
            groups = "row groups" if self.format == "parquet" else "record batches"
            return f"{self.path} {groups} {self.start}:{self.stop}"
        return self.path if is_whole(self.path, self.format) else f"{self.path} bytes {self.start}:{self.stop}"

    @property
    def paths(self) -> tuple[str, ...]:
        """All files of the unit in order."""
        return (self.path, *self.more)


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used: where it is, why, and how it begins. Places are those of ``Record``."""

    path: str
    line: int
    byte_offset: int
    reason: str
    opening: str

    def __str__(self) -> str:
        if self.line == ROWS:
            return f"{self.path} row {self.byte_offset}: {self.reason}: {self.opening}"
        line = f":{self.line}" if self.line else ""
        return f"{self.path}{line} (byte {self.byte_offset}): {self.reason}: {self.opening}"

    def to_json(self) -> dict[str, str | int]:
        """Return file, line and byte_offset (or the row of a parquet file), reason and opening."""
        if self.line == ROWS:
            place: dict[str, str | int] = {"row": self.byte_offset}
        else:
            place = {"line": self.line, "byte_offset": self.byte_offset}
        return {"file": self.path, **place, "reason": self.reason, "opening": self.opening}


def is_whole(path: str | Path, format: str) -> bool:
    """Return whether a file can only be read from its beginning."""
    return str(path) == STDIN or format == "text-file" or compression_of(path) is not None


def compression_of(path: str | Path) -> str | None:
    """Return "gz" or "zst" by the file's name, None for a file that is not compressed."""
    suffix = Path(path).suffix.lower()
    return suffix[1:] if suffix in (".gz", ".zst") else None


# What a job is asked to do, and what it says when it is done.


class Share(NamedTuple):
    """Job ``number`` (from 1) of ``num_jobs`` that make one output and say nothing to each other.

    Its units are those whose number divided by ``num_jobs`` leaves ``number - 1``: unit 0 is of job 1, unit 1 of job 2,
    and so on, so that neighbours, which are often alike, are spread over all jobs.
    """

    number: int
    num_jobs: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """Read ``3/16``.

        Raises:
            ValueError: it is no such text, or 3 is not in 1 ... 16.
        """
        found = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        if not found:
            raise ValueError(f"must be the number of a job and how many there are, such as 3/16, got {text!r}")
        number, count = int(found[1]), int(found[2])
        if not 1 <= number <= count:
            hint = "" if number else f"; give an array of SLURM --array=1-{count}"
            raise ValueError(f"must be from 1/{max(count, 1)} to {max(count, 1)}/{max(count, 1)}, got {text}{hint}")
        return cls(number, count)

    def __str__(self) -> str:
        return f"{self.number}/{self.num_jobs}"

    @property
    def suffix(self) -> str:
        """How names of files call it."""
        return f"part-{self.number}-of-{self.num_jobs}"

    def owns(self, unit: int) -> bool:
        """Return whether the unit of this number is encoded by this job."""
        return unit % self.num_jobs == self.number - 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to turn into what. The tokens do not depend on ``num_workers`` nor on ``unit_bytes``.

    Args:
        inputs: files and folders in order; ``-`` for standard input.
        output_prefix: path of the output without ``.bin``.
        upload_to: the same in an object store, where the files go when they are whole; None: they stay.
        make_tokenizer: called once.
        num_workers: processes that encode; with ``cluster`` units at a time, 0 for as many as it has CPUs.
        format: of all inputs, one of ``FORMATS``; None for that which each file's name says.
        json_keys: where the text is; those of several keys are joined.
        max_bad_lines, max_bad_fraction: how much may be bad (``Limits``).
        max_document_chars: longer documents are bad; 0 for no limit.
        unit_bytes: size of the units of work; None for what suits the input and the workers.
        resume: go on with the finished units of a job that was cut off.
        use_gigatoken: encode with ``gigatoken`` where it gives the same ids.
        share: encode the units of this share alone into the folder of parts, which other jobs fill too; None for all.
        cluster: the Ray cluster that encodes, "auto" or HOST:PORT; None for processes of this machine.
    """

    inputs: Sequence[Path | str]
    output_prefix: str
    make_tokenizer: Callable[[], Tokenizer]
    format: str | None = None
    json_keys: Sequence[str] = ("text",)
    append_eod: bool = True
    num_workers: int = 1
    max_bad_lines: int | None = None
    max_bad_fraction: float | None = None
    max_document_chars: int = 0
    unit_bytes: int | None = None
    resume: bool = False
    use_gigatoken: bool = False
    share: Share | None = None
    cluster: str | None = None
    upload_to: str | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What came of a job.

    Args:
        num_bytes: of text and JSON, decompressed, those of resumed units among them.
        num_resumed: units that were finished before.
        seconds: of this run.
        bad_path: where the bad records are told, None where there are none.
    """

    num_documents: int
    num_tokens: int
    num_empty: int = 0
    num_bad: int = 0
    num_bytes: int = 0
    num_units: int = 0
    num_resumed: int = 0
    seconds: float = 0.0
    bad_path: str | None = None


# How far the encoding has come: the numbers that progress, limits and the summary are made of.


class Counts(NamedTuple):
    """What was read and what came of it; the sum of two of them is that of what both stand for.

    Args:
        num_bytes: of text and JSON, decompressed.
        num_records: lines, rows, blocks or files, those that gave no document among them.
        num_empty: records without any text; skipped.
        num_bad: records that cannot be used.
        max_token_id: -1 where there is no token.
    """

    num_bytes: int = 0
    num_records: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    num_bad: int = 0
    max_token_id: int = -1


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sum of all ``counts``."""
    found = list(counts)
    sums = {name: sum(getattr(count, name) for count in found) for name in Counts._fields}
    return Counts(**sums | {"max_token_id": max((count.max_token_id for count in found), default=-1)})

"""Data types that this package's modules share: Job, Unit, Record, Counts, Summary."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.tokenizer import Tokenizer

# Input: work units, raw records, and bad records.

TABLES = ("parquet", "arrow")
"""Formats with one document per row; a unit is a range of row groups or record batches."""

FORMATS = ("jsonl", "text-file", "text-block", *TABLES)
"""Input formats: one JSON object per line; one document per file; documents between blank lines; a document per row."""

STDIN = "-"
"""The path that denotes standard input."""

ROWS = -1
"""``Record.line`` of a row in a parquet or Arrow file; its position is a row number instead of a byte offset."""


class Record(NamedTuple):
    """Raw bytes of one document, or of the JSON that contains it, and their position.

    Args:
        path: the file, ``-`` for standard input.
        line: line number from 1; 0 if unknown (in a unit that begins within a file); ROWS for a table row.
        byte_offset: offset of ``data`` in the (decompressed) file; for a table, the row number in the file.
    """

    path: str
    line: int
    byte_offset: int
    data: bytes


@dataclass(frozen=True)
class Unit:
    """A corpus part that one process encodes.

    Args:
        idx: index among all units; the output has the documents in unit order, then in record order.
        path: the file, ``-`` for standard input.
        start, stop: the unit contains the documents that begin in this byte range, or a range of row groups
            (parquet) or record batches (Arrow). Files that can only be read from the beginning (compressed files, one
            document per file, standard input) are not divided.
        size: bytes on the disk, for the progress display; 0 for standard input.
        more_paths: additional small files that are read after ``path``, so that a million files are not a million
            units.
    """

    idx: int
    path: str
    format: str
    start: int
    stop: int
    size: int
    more_paths: tuple[str, ...] = ()

    def name(self) -> str:
        """Return the unit's name for messages."""
        if self.path == STDIN:
            return "standard input"
        if self.more_paths:
            return f"{self.path} and {len(self.more_paths)} more files"
        if self.format in TABLES:
            unit_name = "row groups" if self.format == "parquet" else "record batches"
            return f"{self.path} {unit_name} {self.start}:{self.stop}"
        return self.path if is_indivisible(self.path, self.format) else f"{self.path} bytes {self.start}:{self.stop}"

    @property
    def paths(self) -> tuple[str, ...]:
        """All files in order."""
        return (self.path, *self.more_paths)


@dataclass(frozen=True)
class BadRecord:
    """An unusable record: position (as in ``Record``), reason, and first characters."""

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
        """Convert to a dictionary with file, line and byte_offset (or row for a table), reason and opening."""
        if self.line == ROWS:
            position: dict[str, str | int] = {"row": self.byte_offset}
        else:
            position = {"line": self.line, "byte_offset": self.byte_offset}
        return {"file": self.path, **position, "reason": self.reason, "opening": self.opening}


def is_indivisible(path: str | Path, format: str) -> bool:
    """Check if a file can only be read from its beginning."""
    return str(path) == STDIN or format == "text-file" or compression_type(path) is not None


def compression_type(path: str | Path) -> str | None:
    """Detect the compression from the file name: "gz", "zst", or None if the file is not compressed."""
    suffix = Path(path).suffix.lower()
    return suffix[1:] if suffix in (".gz", ".zst") else None


# Job arguments and result.


class Share(NamedTuple):
    """Job ``job_number`` (from 1) out of ``num_jobs`` independent jobs that produce one output.

    The job encodes the units with index % ``num_jobs`` == ``job_number - 1``: unit 0 belongs to job 1, unit 1 to job 2,
    and so on. Neighbouring units, which are often similar, are thus distributed over all jobs.
    """

    job_number: int
    num_jobs: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """Parse a text such as ``3/16``.

        Raises:
            ValueError: the text is malformed, or the job number is not in 1 ... ``num_jobs``.
        """
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        if not match:
            raise ValueError(f"must be JOB/NUMBER_OF_JOBS, such as 3/16, got {text!r}")
        job_number, count = int(match[1]), int(match[2])
        if not 1 <= job_number <= count:
            hint = "" if job_number else f"; start the SLURM array at 1: --array=1-{count}"
            raise ValueError(f"must be from 1/{max(count, 1)} to {max(count, 1)}/{max(count, 1)}, got {text}{hint}")
        return cls(job_number, count)

    def __str__(self) -> str:
        return f"{self.job_number}/{self.num_jobs}"

    @property
    def suffix(self) -> str:
        """Share name in file names."""
        return f"part-{self.job_number}-of-{self.num_jobs}"

    def owns(self, unit_idx: int) -> bool:
        """Check if this job encodes unit ``unit_idx``."""
        return unit_idx % self.num_jobs == self.job_number - 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """Arguments to a preprocessing job. The tokens do not depend on ``num_workers`` or ``unit_bytes``.

    Args:
        inputs: files and folders in order; ``-`` for standard input.
        output_prefix: output path without ``.bin``.
        upload_to: output prefix in an object store to which the finished files are moved; None: no upload.
        make_tokenizer: creates the tokenizer; called once.
        num_workers: worker processes; with ``cluster``, the maximum concurrent units (0: the cluster's CPU count).
        format: format for all inputs, one of ``FORMATS``; None: determined by each file's name.
        json_keys: text keys; the texts at several keys are joined.
        max_bad_lines, max_bad_fraction: bad record limits (``ErrorLimits``).
        max_document_chars: maximum length; longer documents are bad records. 0: no limit.
        unit_bytes: work unit size; None: derived from the input size and the worker count.
        resume: continue an interrupted job with its finished units.
        use_gigatoken: encode with ``gigatoken`` if it returns the same ids.
        share: encode only this share's units, into a folder shared with other jobs; None: all units.
        cluster: Ray cluster that encodes the units, "auto" or HOST:PORT; None: processes on this machine.
        reports_all_bad: encode all units before failing because of bad records, so that all of them are reported.
        source: digest of the text, stored in the sidecar; None: not stored.
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
    reports_all_bad: bool = False
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A job's result.

    Args:
        num_bytes: decompressed text and JSON bytes, including resumed units.
        num_resumed: units that were finished by an earlier run.
        seconds: duration of this run.
        bad_path: path to the bad record list; None if there are none.
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


# Counts for the progress display, the error limits and the summary.


class Counts(NamedTuple):
    """Records read and tokens produced; ``sum_counts`` adds them up.

    Args:
        num_bytes: decompressed text and JSON bytes.
        num_records: lines, rows, blocks or files, including those without a document.
        num_empty: records without text; they are skipped.
        num_bad: unusable records.
        max_token_id: largest token id; -1 without tokens.
    """

    num_bytes: int = 0
    num_records: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    num_bad: int = 0
    max_token_id: int = -1


def sum_counts(counts: Iterable[Counts]) -> Counts:
    """Add up ``counts`` (the maximum for ``max_token_id``)."""
    all_counts = list(counts)
    totals = {name: sum(getattr(count, name) for count in all_counts) for name in Counts._fields}
    return Counts(**totals | {"max_token_id": max((count.max_token_id for count in all_counts), default=-1)})

"""What reading a corpus gives: units of work, records of raw bytes, and records that are of no use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

FORMATS = ("jsonl", "text-file", "text-block", "parquet")
"""One JSON object per line; one document per file; documents between blank lines; one document per row."""

STDIN = "-"
"""The path that stands for standard input."""

ROWS = -1
"""``Record.line`` of a row of a parquet file, whose place is a row number, not a byte."""


class Record(NamedTuple):
    """Bytes of one document, or of the JSON that holds it, and where they are.

    Args:
        path: the file, ``-`` for standard input.
        line: from 1; 0 where nobody has counted (a unit that begins within a file); ROWS for a row of parquet.
        byte_offset: where ``data`` begins in the (decompressed) file; of parquet the number of the row in the file.
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
        start, stop: the unit holds the documents that begin at these bytes; row groups for parquet; the whole file
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
        if self.format == "parquet":
            return f"{self.path} row group {self.start}"
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

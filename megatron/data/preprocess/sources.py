"""Reading a corpus: raw records with the place they come from, undecoded, so that one reader serves many encoders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatron.errors import DataError

FORMATS = ("jsonl", "text-file", "text-block")
"""One JSON object per line; one plain text document per file; plain text documents between blank lines."""

_BOM = b"\xef\xbb\xbf"
_KINDS = {
    b"\x1f\x8b": "gzip; unpack it: gzip -d",
    b"\xfd7zXZ": "xz; unpack it: xz -d",
    b"\x28\xb5\x2f\xfd": "zstandard; unpack it: zstd -d",
    b"BZh": "bzip2; unpack it: bzip2 -d",
    b"PAR1": "parquet; write its text column as JSON lines first",
    b"ARROW1": "arrow; write its text column as JSON lines first",
    b"PK\x03\x04": "zip; unpack it: unzip",
    b"%PDF": "PDF; take its text out first",
    b"MMIDIDX": "an index of tokens; give the text itself",
    b"\xff\xfe": "UTF-16; convert it: iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16; convert it: iconv -f UTF-16 -t UTF-8",
}


@dataclass(frozen=True)
class Record:
    """Bytes of one document, or of the JSON line that holds it, and where they begin (lines count from 1)."""

    path: str
    line: int
    byte_offset: int
    data: bytes


def guess_format(paths: Iterable[Path]) -> str:
    """Return the format by the files' names: JSON lines for .jsonl, .json, .ndjson; else a document per file.

    Raises:
        DataError: the names say both.
    """
    formats = {"jsonl" if path.suffix in (".jsonl", ".json", ".ndjson") else "text-file" for path in paths}
    if len(formats) != 1:
        raise DataError(
            "--input must be files of one kind, got both JSON lines and plain text by their names; give --format"
        )
    return formats.pop()


def check_is_text(path: Path) -> None:
    """Refuse a file that is missing, or whose first bytes are those of an archive or of another encoding.

    Raises:
        DataError: says what the file looks like and how to turn it into text.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror}") from error
    for opening, kind in _KINDS.items():
        if head.startswith(opening):
            raise DataError(f"--input {path} must be UTF-8 text; it looks like {kind}")
    if head.count(0) > len(head) // 10:
        raise DataError(f"--input {path} must be UTF-8 text; it looks like a binary file ({head.count(0)} zero bytes)")


def read(paths: Iterable[Path], format: str) -> Iterator[Record]:
    """Yield the records of all files in their order; blank lines and empty files give none."""
    readers = {"jsonl": _lines, "text-file": _whole, "text-block": _blocks}
    for path in paths:
        with open(path, "rb") as file:
            if file.read(len(_BOM)) != _BOM:
                file.seek(0)
            yield from readers[format](str(path), file)


def _lines(path: str, file: BinaryIO) -> Iterator[Record]:
    offset = file.tell()
    for number, line in enumerate(file, 1):
        if not line.isspace():
            yield Record(path, number, offset, line.rstrip(b"\r\n"))
        offset += len(line)


def _whole(path: str, file: BinaryIO) -> Iterator[Record]:
    start = file.tell()
    data = file.read()
    if data and not data.isspace():
        yield Record(path, 1, start, data)


def _blocks(path: str, file: BinaryIO) -> Iterator[Record]:
    block: list[bytes] = []
    first, start, offset = 1, file.tell(), file.tell()
    for number, line in enumerate(file, 1):
        if line.isspace():
            if block:
                yield Record(path, first, start, b"".join(block))
            block = []
        else:
            if not block:
                first, start = number, offset
            block.append(line)
        offset += len(line)
    if block:
        yield Record(path, first, start, b"".join(block))

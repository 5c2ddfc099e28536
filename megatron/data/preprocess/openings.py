"""What a file is by its first bytes, and what to do about one that is no text."""

from __future__ import annotations

from pathlib import Path

from megatron.data.preprocess.records import compression_of
from megatron.errors import DataError

HEAD_BYTES = 4096
BOM = b"\xef\xbb\xbf"

_MAGIC = {"gz": b"\x1f\x8b", "zst": b"\x28\xb5\x2f\xfd"}
_UTF16 = "UTF-16; convert it: iconv -f UTF-16 -t UTF-8"
_KINDS = {
    _MAGIC["gz"]: "gzip; give it a name that ends in .gz, or unpack it: gzip -d",
    _MAGIC["zst"]: "zstandard; give it a name that ends in .zst, or unpack it: zstd -d",
    b"\xfd7zXZ": "xz; unpack it: xz -d",
    b"BZh": "bzip2; unpack it: bzip2 -d",
    b"PK\x03\x04": "zip; unpack it: unzip",
    b"7z\xbc\xaf": "7-zip; unpack it: 7z x",
    b"Rar!": "RAR; unpack it: unrar x",
    b"PAR1": "parquet; give it a name that ends in .parquet, or --format parquet",
    b"ARROW1": "arrow; write it as parquet first",
    b"%PDF": "PDF; take its text out first",
    b"MMIDIDX": "an index of tokens; give the text itself",
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"\x7fELF": "a program",
    b"SQLite format 3\x00": "an SQLite database; write its text as JSON lines first",
    b"\xff\xfe\x00\x00": "UTF-32; convert it: iconv -f UTF-32 -t UTF-8",
    b"\x00\x00\xfe\xff": "UTF-32; convert it: iconv -f UTF-32 -t UTF-8",
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
}
_TAR = slice(257, 262)


def check_is_text(path: str | Path, head: bytes) -> None:
    """Refuse a text that begins with ``head``, its first HEAD_BYTES, if those are of an archive or another encoding.

    Raises:
        DataError: says what it looks like and how to turn it into text.
    """
    inside = " (decompressed)" if compression_of(path) else ""
    for opening, kind in _KINDS.items():
        if head.startswith(opening):
            raise DataError(f"--input {path}{inside} must be UTF-8 text; it looks like {kind}")
    if head[_TAR] == b"ustar":
        raise DataError(f"--input {path}{inside} must be UTF-8 text; it looks like tar; unpack it: tar -xf")
    if head.count(0) > len(head) // 10:
        raise DataError(
            f"--input {path}{inside} must be UTF-8 text; it looks like a binary file or UTF-16 without a mark "
            f"({head.count(0)} of the first {len(head)} bytes are zero)"
        )


def check_is_lines(path: str | Path, head: bytes) -> None:
    """Refuse JSON that is laid out over several lines, if ``head``, the first bytes of a file, begins so.

    Raises:
        DataError: names the command that writes each object on a line of its own.
    """
    line = head.removeprefix(BOM).lstrip().partition(b"\n")[0].strip()
    if line in (b"[", b"[{") or (line.startswith(b"[") and line.endswith(b",")):
        what, cure = "one JSON array", ".[]"
    elif line == b"{":
        what, cure = "objects that take several lines each", "."
    else:
        return
    raise DataError(
        f"--input {path} must have one JSON object on each line; it looks like {what}. "
        f"Write each object on a line of its own: jq -c '{cure}'"
    )


def check_is_compressed(path: str | Path, head: bytes) -> None:
    """Refuse a file whose name says .gz or .zst and whose first bytes do not; an empty file has nothing to say.

    Raises:
        DataError: names both.
    """
    kind = compression_of(path)
    skippable = kind == "zst" and head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5
    if kind and head and not head.startswith(_MAGIC[kind]) and not skippable:
        raise DataError(
            f"--input {path} must be what its name says, .{kind}; its first bytes are {head[:4].hex(' ')}, those of "
            f".{kind} {_MAGIC[kind].hex(' ')}. If it is plain text, take .{kind} off its name."
        )


def read_head(path: str | Path) -> bytes:
    """Return the first HEAD_BYTES of a file.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror}") from error

"""Lines, texts and rows out of plain, compressed and parquet files."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import orjson
import zstandard

from megatron import object_store
from megatron.data.preprocess.job_types import ROWS, STDIN, Record, Unit, compression_of
from megatron.errors import DataError

# Rows of parquet files, through pyarrow, which is imported only when such a file comes.

_ROWS_AT_ONCE = 256
_BYTES_AT_ONCE = 4 << 20


def row_groups(path: str) -> list[int]:
    """Return the size in bytes of each row group of a file.

    Raises:
        DataError: pyarrow is missing, or the file is no whole parquet file.
    """
    with _opened(path) as file:
        return [file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups)]


def column_bytes(unit: Unit, keys: Sequence[str]) -> int:
    """Return the bytes of the columns ``keys`` in the unit's row groups, before they were compressed."""
    with _opened(unit.path) as file:
        groups = [file.metadata.row_group(number) for number in range(unit.start, unit.stop)]
        columns = [group.column(number) for group in groups for number in range(group.num_columns)]
        return sum(column.total_uncompressed_size for column in columns if column.path_in_schema in keys)


def read_records(unit: Unit, keys: Sequence[str]) -> Iterator[Record]:
    """Yield the rows of the unit's row groups, each as a JSON object of the columns ``keys`` ("a.b" for fields of one).

    Memory is that of 256 rows, or of 4 MB of rows by their mean size where that is less, and pyarrow's own.

    Raises:
        DataError: a column is missing or holds no strings, or the file is damaged.
    """
    with _opened(unit.path) as file:
        check_columns(file.schema_arrow, unit.path, keys)
        groups = [file.metadata.row_group(number) for number in range(unit.stop)]
        number = sum(group.num_rows for group in groups[: unit.start])
        rows_at_once = _rows_at_once(groups[unit.start :])
        try:
            for batch in file.iter_batches(
                rows_at_once, list(range(unit.start, unit.stop)), columns=list(keys), use_threads=False
            ):
                for data in rows_as_json(batch, keys):
                    yield Record(unit.path, ROWS, number, data)
                    number += 1
        except (OSError, ValueError) as error:  # pyarrow's errors are of these two
            raise DataError(
                f"--input {unit.path} must be a whole parquet file; it is damaged at row {number} ({error})"
            ) from error


def _rows_at_once(groups: Sequence[Any]) -> int:
    """Return how many rows of these groups take some 4 MB, by the size that their metadata tell."""
    mean = sum(group.total_byte_size for group in groups) / max(sum(group.num_rows for group in groups), 1)
    return max(1, min(_ROWS_AT_ONCE, int(_BYTES_AT_ONCE / max(mean, 1))))


def rows_as_json(batch: Any, keys: Sequence[str]) -> Iterator[bytes]:
    """Yield the rows of a record batch with the columns ``keys``, each as a JSON object."""
    for part in _slices(batch):
        try:
            rows = part.to_pylist()
        except UnicodeDecodeError:  # some text is no UTF-8: pass its bytes on row by row, parsing names the one
            for number in range(part.num_rows):
                yield _row_as_json(part.slice(number, 1), keys)
        else:
            yield from map(orjson.dumps, rows)


def _slices(batch: Any) -> Iterator[Any]:
    """Cut a batch by its size in memory: a text that many rows share lies in the file once."""
    step = max(1, batch.num_rows * _BYTES_AT_ONCE // max(batch.nbytes, 1))
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)


def _row_as_json(row: Any, keys: Sequence[str]) -> bytes:
    try:
        return orjson.dumps(row.to_pylist()[0])
    except UnicodeDecodeError:
        return b"{" + b",".join(orjson.dumps(key) + b":" + _raw_text(row, key) for key in keys) + b"}"


def _raw_text(row: Any, key: str) -> bytes:
    """Return the text at ``key`` as JSON, its bytes as they are where they are no UTF-8."""
    first, *inner = [key] if key in row.schema.names else key.split(".")
    column = row.column(first)
    for name in inner:
        column = column.field(name)
    try:
        return orjson.dumps(column.to_pylist()[0])
    except UnicodeDecodeError as error:
        return b'"' + error.object + b'"'


def check_columns(schema: Any, path: str, keys: Sequence[str]) -> None:
    """Check that a table has one column of strings for each of ``keys``.

    Raises:
        DataError: It has not; names the column.
    """
    import pyarrow
    from pyarrow import types

    for key in keys:
        fields: Any = schema
        kind: Any = None
        for name in [key] if key in schema.names else key.split("."):
            times = 0 if fields is None else [field.name for field in fields].count(name)
            if times > 1:
                raise DataError(
                    f"--input {path} must have one column {key!r} (--json-key), it has {times} of that name"
                )
            if not times:
                names = ", ".join(schema.names) or "none"
                raise DataError(f"--input {path} must have a column {key!r} (--json-key), it has only {names}")
            kind = fields.field(name).type
            fields = kind if isinstance(kind, pyarrow.StructType) else None
        if types.is_dictionary(kind):
            kind = kind.value_type
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
            raise DataError(f"--input {path}: column {key!r} (--json-key) must hold strings, it holds {kind}")


def _opened(path: str) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"--input {path} is parquet, which needs pyarrow: pip install -e '.[parquet]'") from error
    try:
        file = object_store.open_file(path) if object_store.is_remote(path) else path
        return parquet.ParquetFile(file, pre_buffer=False)
    except (OSError, ValueError) as error:
        raise DataError(f"--input {path} must be a whole parquet file, pyarrow says: {error}") from error


# What a file is by its first bytes, and what to do about one that is no text.

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
    b"ARROW1": "an Arrow file; give it a name that ends in .arrow, or --format arrow",
    b"\xff\xff\xff\xff": "an Arrow stream; give it a name that ends in .arrow, or --format arrow",
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
        with object_store.open_file(path) as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror}") from error


# Decompressing .gz and .zst in pieces, so that memory does not depend on the file; damage is named with its place.

_PIECE_BYTES = {"gz": 1 << 16, "zst": 1 << 11}
"""Compressed bytes at a time. One call may inflate gzip a thousandfold and zstandard 32,000-fold, so pieces are small:
a file made to burst takes some 200 MB, ordinary text a few hundred kB."""

_LARGEST_WINDOW = 1 << 31
"""What ``zstd --long=31`` asks for; memory is taken only for files that were written with such a window."""

_JUDGED_BYTES = 1 << 23


class _Stream(Protocol):
    """One gzip member or zstandard frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def decompressed(path: str, file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of ``file``, which is compressed as its name says; members one after another are one text.

    Raises:
        DataError: the file is damaged or cut off; says at which byte, and how many could be unpacked.
    """
    kind = compression_of(path) or ""
    stream, in_stream, place, unpacked = _new(kind), False, 0, 0
    while piece := file.read(_PIECE_BYTES[kind]):
        place += len(piece)
        while piece := piece if in_stream or kind != "gz" else piece.lstrip(b"\x00"):  # tapes fill up with zeros
            try:
                data = stream.decompress(piece)
            except (zlib.error, zstandard.ZstdError) as error:
                raise _damaged(path, kind, f"damaged before byte {place} ({error})", unpacked) from None
            unpacked += len(data)
            if data:
                yield data
            in_stream, piece = not stream.eof, stream.unused_data
            if not in_stream:
                stream = _new(kind)
    if in_stream:
        raise _damaged(path, kind, f"cut off: it ends at byte {place}, in the middle of a stream", unpacked)


def check_is_whole(path: str) -> None:
    """Read a compressed file through; one with no checksum is only seen to be damaged where that breaks its stream.

    Raises:
        DataError: the file is damaged or cut off, or cannot be read.
    """
    try:
        with object_store.open_file(path) as file:
            for _ in decompressed(path, file):
                pass
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror}") from error


def unpacked_size(path: str) -> int:
    """Return about how many bytes a compressed file holds, judged by its first ones; exact for small files."""
    unpacked = 0
    with object_store.open_file(path) as file:
        for data in decompressed(path, file):
            unpacked += len(data)
            if unpacked >= _JUDGED_BYTES:
                return unpacked * object_store.status(path).size // file.tell()
    return unpacked


def _new(kind: str) -> _Stream:
    if kind == "gz":
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    return zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()


def _damaged(path: str, kind: str, what: str, unpacked: int) -> DataError:
    tool = {"gz": "gzip -t", "zst": "zstd -t"}[kind]
    return DataError(
        f"--input {path} must be a whole .{kind} file; it is {what}, after {unpacked} bytes of text. "
        f"Check it ({tool}) and fetch it again."
    )


# The bytes of a unit's files as blocks, wherever they come from.

BLOCK_BYTES = 1 << 18


def blocks(path: str, start: int = 0) -> Iterator[bytes]:
    """Yield the (decompressed) bytes of a file from ``start`` on; those of a stream from its beginning, checked.

    Raises:
        DataError: the file cannot be read, is damaged, or a stream holds no text.
    """
    try:
        if path == STDIN:
            with open(0, "rb", closefd=False) as file:  # a forked process has no sys.stdin, but it has its descriptor
                yield from _checked(path, _raw(file))
            return
        with object_store.open_file(path) as file:
            if compression_of(path):
                yield from _checked(path, decompressed(path, file))
            else:
                file.seek(start)
                yield from _raw(file)
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror}") from error


def _raw(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def _checked(path: str, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Look at the first bytes of what cannot be looked at before."""
    head = b""
    for piece in pieces:
        head += piece
        if len(head) >= HEAD_BYTES:
            break
    check_is_text(path, head[:HEAD_BYTES])
    return chain([head] if head else [], pieces)


# Cutting blocks of bytes into records: lines, texts between blank lines, whole files.
#
# A record belongs to the unit in which it begins, wherever the borders of units fall: a line by its first byte, a text
# between blank lines by the first byte of the last blank line before it. So no unit has to know what lies before it.

_LONGEST_LINE = 1 << 30


def lines(unit: Unit) -> Iterator[Record]:
    """Yield the lines that begin in [unit.start, unit.stop), without their line feeds; blank ones too."""
    for batch, _ in _batches(unit):
        if batch[-1].byte_offset >= unit.stop:
            yield from (record for record in batch if record.byte_offset < unit.stop)
            return
        yield from batch


def texts_between_blank_lines(unit: Unit) -> Iterator[Record]:
    """Yield what stands between blank lines, with its line ends, as far as it is the unit's."""
    text: list[bytes] = []
    place: Record | None = None
    is_ours = not unit.start  # no blank line stands before the first text of a file
    for record, is_ended in ((record, are_ended) for batch, are_ended in _batches(unit) for record in batch):
        data = record.data.removeprefix(BOM)  # `cat` leaves that of a file in the middle
        if data and not data.isspace():
            if is_ours:
                place = place or record
                text += (data, b"\n") if is_ended else (data,)
        else:
            if place:
                yield place._replace(data=b"".join(text))
            text, place, is_ours = [], None, True
        if record.byte_offset >= unit.stop and not place:
            return
    if place:
        yield place._replace(data=b"".join(text))


def whole_files(unit: Unit) -> Iterator[Record]:
    """Yield each file of the unit as one record."""
    for path in unit.paths:
        data = b"".join(blocks(path))
        start = len(BOM) if data.startswith(BOM) else 0
        yield Record(path, 1, start, data[start:].replace(b"\n" + BOM, b"\n"))


def _batches(unit: Unit) -> Iterator[tuple[list[Record], bool]]:
    """Yield the lines that begin at ``unit.start`` or later, until the file ends, and whether line feeds end them.

    Lines are counted where the reading begins with the file.
    """
    path = unit.path
    make = tuple.__new__  # a third of the time that Record(...) takes, which matters for short lines
    offset, stream = _first_line(unit)
    line, step = (0, 0) if unit.start else (1, 1)
    for cut, are_ended in _cut(path, stream):
        batch = []
        for data in cut:
            batch.append(make(Record, (path, line, offset, data)))
            offset += len(data) + 1
            line += step
        yield batch, are_ended


def _first_line(unit: Unit) -> tuple[int, Iterator[bytes]]:
    """Return where the unit's first line begins, and what follows from there."""
    if not unit.start:
        stream = blocks(unit.path)
        head = next(stream, b"")
        if unit.format == "jsonl":
            check_is_lines(unit.path, head[:HEAD_BYTES])
        start = len(BOM) if head.startswith(BOM) else 0
        return start, chain([head[start:]], stream)
    place = unit.start - 1
    stream = blocks(unit.path, place)
    for block in stream:
        if (found := block.find(b"\n")) >= 0:
            return place + found + 1, chain([block[found + 1 :]], stream)
        place += len(block)
        if place >= unit.stop:
            break
    return unit.stop, iter(())


def _cut(path: str, stream: Iterator[bytes]) -> Iterator[tuple[list[bytes], bool]]:
    """Yield lines as they are complete, many at a time, then what follows the last line feed, if anything does."""
    rest: list[bytes] = []
    size = 0
    for block in stream:
        *ended, last = block.split(b"\n")
        if ended:
            ended[0] = b"".join([*rest, ended[0]])
            rest, size = [], 0  # before the yield: while a giant line is used, its pieces must not lie beside it
            yield ended, True
        rest.append(last)
        size += len(last)
        if size > _LONGEST_LINE:
            raise DataError(
                f"--input {path} must have lines of at most {_LONGEST_LINE} bytes, got a longer one; "
                "if it is one large JSON array, write each element on a line of its own: jq -c '.[]'"
            )
    if size:
        yield [b"".join(rest)], False

"""Read lines, texts and rows from plain, compressed and parquet files."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import orjson
import zstandard

from megatron import object_store
from megatron.data.preprocess.job_types import ROWS, STDIN, Record, Unit, compression_type
from megatron.errors import DataError

# Parquet rows. pyarrow is imported when the first such file is opened.

_MAX_ROWS_PER_BATCH = 256
_MAX_BATCH_BYTES = 4 << 20


def row_groups(path: str) -> list[int]:
    """Read the row group sizes in bytes.

    Raises:
        DataError: pyarrow is missing, or the file is not a complete parquet file.
    """
    with _open_parquet(path) as file:
        return [file.metadata.row_group(idx).total_byte_size for idx in range(file.num_row_groups)]


def column_bytes(unit: Unit, keys: Sequence[str]) -> int:
    """Measure the uncompressed bytes in the columns ``keys`` in the unit's row groups."""
    with _open_parquet(unit.path) as file:
        groups = [file.metadata.row_group(idx) for idx in range(unit.start, unit.stop)]
        columns = [group.column(idx) for group in groups for idx in range(group.num_columns)]
        return sum(column.total_uncompressed_size for column in columns if column.path_in_schema in keys)


def read_records(unit: Unit, keys: Sequence[str]) -> Iterator[Record]:
    """Read rows from the unit's row groups, each as a JSON object with the columns ``keys`` ("a.b" for a field).

    Memory use is limited to 256 rows or 4 MB of average rows, whichever is less, in addition to pyarrow's buffers.

    Raises:
        DataError: a column is missing or does not contain strings, or the file is damaged.
    """
    with _open_parquet(unit.path) as file:
        check_columns(file.schema_arrow, unit.path, keys)
        groups = [file.metadata.row_group(row) for row in range(unit.stop)]
        row = sum(group.num_rows for group in groups[: unit.start])
        rows_per_batch = _rows_per_batch(groups[unit.start :])
        try:
            for batch in file.iter_batches(
                rows_per_batch, list(range(unit.start, unit.stop)), columns=list(keys), use_threads=False
            ):
                for data in rows_as_json(batch, keys):
                    yield Record(unit.path, ROWS, row, data)
                    row += 1
        except (OSError, ValueError) as error:  # base classes of pyarrow's errors
            raise DataError(
                f"--input {unit.path} must be a complete parquet file; it is damaged at row {row} ({error})"
            ) from error


def _rows_per_batch(groups: Sequence[Any]) -> int:
    """Choose the row count that takes about 4 MB according to the metadata in ``groups``, at most 256."""
    mean = sum(group.total_byte_size for group in groups) / max(sum(group.num_rows for group in groups), 1)
    return max(1, min(_MAX_ROWS_PER_BATCH, int(_MAX_BATCH_BYTES / max(mean, 1))))


def rows_as_json(batch: Any, keys: Sequence[str]) -> Iterator[bytes]:
    """Convert each row in a record batch with the columns ``keys`` to a JSON object."""
    for batch_slice in _slice_batch(batch):
        try:
            rows = batch_slice.to_pylist()
        except UnicodeDecodeError:  # some text is not UTF-8: yield raw bytes row by row; parse() names the bad row
            for row in range(batch_slice.num_rows):
                yield _row_as_json(batch_slice.slice(row, 1), keys)
        else:
            yield from map(orjson.dumps, rows)


def _slice_batch(batch: Any) -> Iterator[Any]:
    """Split a batch by its size in memory, which may be much larger than in the file, where rows can share a text."""
    step = max(1, batch.num_rows * _MAX_BATCH_BYTES // max(batch.nbytes, 1))
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)


def _row_as_json(row: Any, keys: Sequence[str]) -> bytes:
    try:
        return orjson.dumps(row.to_pylist()[0])
    except UnicodeDecodeError:
        return b"{" + b",".join(orjson.dumps(key) + b":" + _raw_text(row, key) for key in keys) + b"}"


def _raw_text(row: Any, key: str) -> bytes:
    """Format the text at ``key`` as JSON; if it is not UTF-8, its bytes are unchanged."""
    first, *fields = [key] if key in row.schema.names else key.split(".")
    column = row.column(first)
    for name in fields:
        column = column.field(name)
    try:
        return orjson.dumps(column.to_pylist()[0])
    except UnicodeDecodeError as error:
        return b'"' + error.object + b'"'


def check_columns(schema: Any, path: str, keys: Sequence[str]) -> None:
    """Check that a table has exactly one string column for each of ``keys``.

    Raises:
        DataError: a column is missing, duplicated or not of type string; the message names it.
    """
    import pyarrow
    from pyarrow import types

    for key in keys:
        fields: Any = schema
        column_type: Any = None
        for name in [key] if key in schema.names else key.split("."):
            count = 0 if fields is None else [field.name for field in fields].count(name)
            if count > 1:
                raise DataError(
                    f"--input {path} must have one column {key!r} (--json-key), but has {count} of that name"
                )
            if not count:
                names = ", ".join(schema.names) or "none"
                raise DataError(f"--input {path} must have a column {key!r} (--json-key), but has only {names}")
            column_type = fields.field(name).type
            fields = column_type if isinstance(column_type, pyarrow.StructType) else None
        if types.is_dictionary(column_type):
            column_type = column_type.value_type
        if not (
            types.is_string(column_type) or types.is_large_string(column_type) or types.is_string_view(column_type)
        ):
            raise DataError(f"--input {path}: column {key!r} (--json-key) must contain strings, got {column_type}")


def _open_parquet(path: str) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"--input {path} is parquet, which needs pyarrow: pip install -e '.[parquet]'") from error
    try:
        file = object_store.open_file(path) if object_store.is_remote(path) else path
        return parquet.ParquetFile(file, pre_buffer=False)
    except (OSError, ValueError) as error:
        raise DataError(f"--input {path} must be a complete parquet file; pyarrow reports: {error}") from error


# Detect files that are not text by their first bytes.

HEAD_BYTES = 4096
BOM = b"\xef\xbb\xbf"

_MAGIC = {"gz": b"\x1f\x8b", "zst": b"\x28\xb5\x2f\xfd"}
_UTF16 = "UTF-16; convert it: iconv -f UTF-16 -t UTF-8"
_SIGNATURES = {
    _MAGIC["gz"]: "gzip; rename it to end in .gz, or unpack it: gzip -d",
    _MAGIC["zst"]: "zstandard; rename it to end in .zst, or unpack it: zstd -d",
    b"\xfd7zXZ": "xz; unpack it: xz -d",
    b"BZh": "bzip2; unpack it: bzip2 -d",
    b"PK\x03\x04": "zip; unpack it: unzip",
    b"7z\xbc\xaf": "7-zip; unpack it: 7z x",
    b"Rar!": "RAR; unpack it: unrar x",
    b"PAR1": "parquet; rename it to end in .parquet, or set --format parquet",
    b"ARROW1": "an Arrow file; rename it to end in .arrow, or set --format arrow",
    b"\xff\xff\xff\xff": "an Arrow stream; rename it to end in .arrow, or set --format arrow",
    b"%PDF": "PDF; extract its text first",
    b"MMIDIDX": "a token index; name the text files instead",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"\x7fELF": "an executable",
    b"SQLite format 3\x00": "an SQLite database; write its text as JSON lines first",
    b"\xff\xfe\x00\x00": "UTF-32; convert it: iconv -f UTF-32 -t UTF-8",
    b"\x00\x00\xfe\xff": "UTF-32; convert it: iconv -f UTF-32 -t UTF-8",
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
}
_TAR = slice(257, 262)


def check_is_text(path: str | Path, head: bytes) -> None:
    """Reject a file whose first HEAD_BYTES ``head`` identify an archive, a binary file or another encoding.

    Raises:
        DataError: the message names the detected type and how to convert it to text.
    """
    note = " (decompressed)" if compression_type(path) else ""
    for signature, description in _SIGNATURES.items():
        if head.startswith(signature):
            raise DataError(f"--input {path}{note} must be UTF-8 text; it looks like {description}")
    if head[_TAR] == b"ustar":
        raise DataError(f"--input {path}{note} must be UTF-8 text; it looks like tar; unpack it: tar -xf")
    if head.count(0) > len(head) // 10:
        raise DataError(
            f"--input {path}{note} must be UTF-8 text; it looks like a binary file or UTF-16 without a BOM "
            f"({head.count(0)} of the first {len(head)} bytes are zero)"
        )


def check_is_lines(path: str | Path, head: bytes) -> None:
    """Reject JSON with objects that span several lines, judging by ``head``, the file's first bytes.

    Raises:
        DataError: the message names the command that writes each object on one line.
    """
    line = head.removeprefix(BOM).lstrip().partition(b"\n")[0].strip()
    if line in (b"[", b"[{") or (line.startswith(b"[") and line.endswith(b",")):
        layout, jq_filter = "one JSON array", ".[]"
    elif line == b"{":
        layout, jq_filter = "objects that span several lines", "."
    else:
        return
    raise DataError(
        f"--input {path} must have one JSON object on each line; it looks like {layout}. "
        f"Write each object on its own line: jq -c '{jq_filter}'"
    )


def check_is_compressed(path: str | Path, head: bytes) -> None:
    """Reject a file named .gz or .zst whose first bytes ``head`` do not match; empty files are accepted.

    Raises:
        DataError: the message has the expected and the actual bytes.
    """
    suffix = compression_type(path)
    is_skippable = suffix == "zst" and head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5
    if suffix and head and not head.startswith(_MAGIC[suffix]) and not is_skippable:
        raise DataError(
            f"--input {path} must be a .{suffix} file; its first bytes are {head[:4].hex(' ')}, but a .{suffix} file "
            f"starts with {_MAGIC[suffix].hex(' ')}. If it is plain text, remove .{suffix} from its name."
        )


def read_head(path: str | Path) -> bytes:
    """Read a file's first HEAD_BYTES.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with object_store.open_file(path) as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror}") from error


# Decompress .gz and .zst in blocks, so that memory use does not depend on the file. Errors name the position.

_COMPRESSED_CHUNK_BYTES = {"gz": 1 << 16, "zst": 1 << 11}
"""Compressed bytes per call, small because one call may inflate gzip 1,000-fold and zstandard 32,000-fold. The memory
use is about 200 MB for a decompression bomb, and a few hundred kB for ordinary text."""

_MAX_WINDOW_BYTES = 1 << 31
"""The window of ``zstd --long=31``; memory is only allocated for files that were written with such a window."""

_ESTIMATE_BYTES = 1 << 23


class _Stream(Protocol):
    """One gzip member or zstandard frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def decompress(path: str, file: BinaryIO) -> Iterator[bytes]:
    """Decompress ``file``; consecutive members or frames are concatenated.

    Raises:
        DataError: the file is damaged or truncated; the message has the position and the decompressed byte count.
    """
    suffix = compression_type(path) or ""
    stream, is_in_stream, position, num_unpacked_bytes = _new_stream(suffix), False, 0, 0
    while chunk := file.read(_COMPRESSED_CHUNK_BYTES[suffix]):
        position += len(chunk)
        while chunk := chunk if is_in_stream or suffix != "gz" else chunk.lstrip(b"\x00"):  # zero padding of tapes
            try:
                data = stream.decompress(chunk)
            except (zlib.error, zstandard.ZstdError) as error:
                raise _damaged_error(
                    path, suffix, f"damaged before byte {position} ({error})", num_unpacked_bytes
                ) from None
            num_unpacked_bytes += len(data)
            if data:
                yield data
            is_in_stream, chunk = not stream.eof, stream.unused_data
            if not is_in_stream:
                stream = _new_stream(suffix)
    if is_in_stream:
        raise _damaged_error(
            path, suffix, f"truncated: it ends at byte {position}, in the middle of a stream", num_unpacked_bytes
        )


def check_decompresses(path: str) -> None:
    """Decompress a file completely to detect damage; without a checksum, only a broken stream is detected.

    Raises:
        DataError: the file is damaged, truncated or unreadable.
    """
    try:
        with object_store.open_file(path) as file:
            for _ in decompress(path, file):
                pass
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror}") from error


def estimate_unpacked_size(path: str) -> int:
    """Estimate a file's decompressed size from its first 8 MB of text; exact for smaller files."""
    num_unpacked_bytes = 0
    with object_store.open_file(path) as file:
        for data in decompress(path, file):
            num_unpacked_bytes += len(data)
            if num_unpacked_bytes >= _ESTIMATE_BYTES:
                return num_unpacked_bytes * object_store.status(path).size // file.tell()
    return num_unpacked_bytes


def _new_stream(compression: str) -> _Stream:
    if compression == "gz":
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()


def _damaged_error(path: str, compression: str, problem: str, num_unpacked_bytes: int) -> DataError:
    tool = {"gz": "gzip -t", "zst": "zstd -t"}[compression]
    return DataError(
        f"--input {path} must be a complete .{compression} file; it is {problem}, after {num_unpacked_bytes} bytes of "
        f"text. Check it ({tool}) and download it again."
    )


# Byte blocks from plain files, compressed files and standard input.

BLOCK_BYTES = 1 << 18


def read_blocks(path: str, start: int = 0) -> Iterator[bytes]:
    """Read a file's (decompressed) bytes from ``start`` on.

    Compressed files and standard input are read from their beginning, and their first bytes are checked.

    Raises:
        DataError: the file is unreadable or damaged, or compressed data or standard input is not text.
    """
    try:
        if path == STDIN:
            with open(0, "rb", closefd=False) as file:  # forked processes have the descriptor, but no sys.stdin
                yield from _check_first_bytes(path, _raw_blocks(file))
            return
        with object_store.open_file(path) as file:
            if compression_type(path):
                yield from _check_first_bytes(path, decompress(path, file))
            else:
                file.seek(start)
                yield from _raw_blocks(file)
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror}") from error


def _raw_blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def _check_first_bytes(path: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Check a stream's first bytes, which cannot be read in advance; the result iterates over all bytes."""
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) >= HEAD_BYTES:
            break
    check_is_text(path, head[:HEAD_BYTES])
    return chain([head] if head else [], chunks)


# Records in byte blocks: lines, texts between blank lines, complete files.
#
# A record belongs to the unit that contains its first byte. A text between blank lines instead belongs to the unit that
# contains the start of the last blank line before the text. A unit can therefore be read without the preceding data.

_MAX_LINE_BYTES = 1 << 30


def read_lines(unit: Unit) -> Iterator[Record]:
    """Yield the lines, including blank lines, that begin in [unit.start, unit.stop), without line feeds."""
    for batch, _ in _line_batches(unit):
        if batch[-1].byte_offset >= unit.stop:
            yield from (record for record in batch if record.byte_offset < unit.stop)
            return
        yield from batch


def read_text_blocks(unit: Unit) -> Iterator[Record]:
    """Yield the unit's texts between blank lines, including line ends."""
    text_lines: list[bytes] = []
    first_line: Record | None = None
    is_in_unit = not unit.start  # there is no blank line before the first text of a file
    for record, is_ended in ((record, are_ended) for batch, are_ended in _line_batches(unit) for record in batch):
        data = record.data.removeprefix(BOM)  # files joined by `cat` have byte order marks in the middle
        if data and not data.isspace():
            if is_in_unit:
                first_line = first_line or record
                text_lines += (data, b"\n") if is_ended else (data,)
        else:
            if first_line:
                yield first_line._replace(data=b"".join(text_lines))
            text_lines, first_line, is_in_unit = [], None, True
        if record.byte_offset >= unit.stop and not first_line:
            return
    if first_line:
        yield first_line._replace(data=b"".join(text_lines))


def read_files(unit: Unit) -> Iterator[Record]:
    """Read each file in the unit as one record."""
    for path in unit.paths:
        data = b"".join(read_blocks(path))
        start = len(BOM) if data.startswith(BOM) else 0
        yield Record(path, 1, start, data[start:].replace(b"\n" + BOM, b"\n"))


def _line_batches(unit: Unit) -> Iterator[tuple[list[Record], bool]]:
    """Yield (lines, True if they end with line feeds) for all lines from ``unit.start`` to the file's end.

    Lines are numbered only if the unit starts at the beginning of the file.
    """
    path = unit.path
    new_record = tuple.__new__  # three times as fast as Record(...), which matters for short lines
    offset, stream = _seek_first_line(unit)
    line, step = (0, 0) if unit.start else (1, 1)
    for complete_lines, are_ended in _split_lines(path, stream):
        batch = []
        for data in complete_lines:
            batch.append(new_record(Record, (path, line, offset, data)))
            offset += len(data) + 1
            line += step
        yield batch, are_ended


def _seek_first_line(unit: Unit) -> tuple[int, Iterator[bytes]]:
    """Find the offset of the unit's first line, and read the bytes from there on."""
    if not unit.start:
        stream = read_blocks(unit.path)
        head = next(stream, b"")
        if unit.format == "jsonl":
            check_is_lines(unit.path, head[:HEAD_BYTES])
        start = len(BOM) if head.startswith(BOM) else 0
        return start, chain([head[start:]], stream)
    position = unit.start - 1
    stream = read_blocks(unit.path, position)
    for block in stream:
        if (line_end := block.find(b"\n")) >= 0:
            return position + line_end + 1, chain([block[line_end + 1 :]], stream)
        position += len(block)
        if position >= unit.stop:
            break
    return unit.stop, iter(())


def _split_lines(path: str, stream: Iterator[bytes]) -> Iterator[tuple[list[bytes], bool]]:
    """Yield (complete lines, True) per block, and finally ([text after the last line feed], False) if there is any."""
    fragments: list[bytes] = []
    size = 0
    for block in stream:
        *complete_lines, fragment = block.split(b"\n")
        if complete_lines:
            complete_lines[0] = b"".join([*fragments, complete_lines[0]])
            fragments, size = [], 0  # before the yield, to free the fragments of a long line while the line is in use
            yield complete_lines, True
        fragments.append(fragment)
        size += len(fragment)
        if size > _MAX_LINE_BYTES:
            raise DataError(
                f"--input {path} must have lines of at most {_MAX_LINE_BYTES} bytes, got a longer one; "
                "if it is one large JSON array, write each element on its own line: jq -c '.[]'"
            )
    if size:
        yield [b"".join(fragments)], False

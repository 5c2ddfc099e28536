"""Rows of parquet files, through pyarrow, which is imported only when such a file comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from megatron.data.preprocess.records import ROWS, Record, Unit
from megatron.errors import DataError

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


def rows(unit: Unit, keys: Sequence[str]) -> Iterator[Record]:
    """Yield the rows of the unit's row groups, each as a JSON object of the columns ``keys`` ("a.b" for fields of one).

    Memory is that of 256 rows, or of 4 MB of rows by their mean size where that is less, and pyarrow's own.

    Raises:
        DataError: a column is missing or holds no strings, or the file is damaged.
    """
    with _opened(unit.path) as file:
        _check_columns(file, unit.path, keys)
        groups = [file.metadata.row_group(number) for number in range(unit.stop)]
        number = sum(group.num_rows for group in groups[: unit.start])
        rows_at_once = _rows_at_once(groups[unit.start :])
        try:
            for batch in file.iter_batches(
                rows_at_once, list(range(unit.start, unit.stop)), columns=list(keys), use_threads=False
            ):
                for data in _as_json(batch, keys):
                    yield Record(unit.path, ROWS, number, data)
                    number += 1
        except (OSError, ValueError) as error:  # pyarrow's errors are of these two
            raise DataError(
                f"--input {unit.path} must be a whole parquet file; row group {unit.start} is damaged at row {number} "
                f"({error})"
            ) from error


def _rows_at_once(groups: Sequence[Any]) -> int:
    """Return how many rows of these groups take some 4 MB, by the size that their metadata tell."""
    mean = sum(group.total_byte_size for group in groups) / max(sum(group.num_rows for group in groups), 1)
    return max(1, min(_ROWS_AT_ONCE, int(_BYTES_AT_ONCE / max(mean, 1))))


def _as_json(batch: Any, keys: Sequence[str]) -> Iterator[bytes]:
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


def _check_columns(file: Any, path: str, keys: Sequence[str]) -> None:
    import pyarrow
    from pyarrow import types

    for key in keys:
        fields: Any = file.schema_arrow
        kind: Any = None
        for name in [key] if key in file.schema_arrow.names else key.split("."):
            times = 0 if fields is None else [field.name for field in fields].count(name)
            if times > 1:
                raise DataError(
                    f"--input {path} must have one column {key!r} (--json-key), it has {times} of that name"
                )
            if not times:
                names = ", ".join(file.schema_arrow.names) or "none"
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
        return parquet.ParquetFile(path, pre_buffer=False)
    except (OSError, ValueError) as error:
        raise DataError(f"--input {path} must be a whole parquet file, pyarrow says: {error}") from error

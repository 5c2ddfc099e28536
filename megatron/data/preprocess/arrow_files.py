"""Read rows from Arrow IPC files, such as the files that Hugging Face's ``datasets`` writes.

Both IPC formats are supported: the stream format used by ``datasets``, and the file format, which has a footer. Local
files are memory-mapped. pyarrow is imported when the first such file is opened.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron import object_store
from megatron.data.preprocess import readers
from megatron.data.preprocess.job_types import ROWS, Record, Unit
from megatron.errors import DataError

FILE_MAGIC = b"ARROW1"
STREAM_MAGIC = b"\xff\xff\xff\xff"
"""First bytes of a stream: the continuation marker of its first message."""


def batch_sizes(path: str) -> list[int] | None:
    """Read the record batch sizes in bytes; None for a stream in an object store, to avoid reading it.

    Raises:
        DataError: pyarrow is missing, or the file is not a complete Arrow file.
    """
    with _open_arrow(path) as (reader, is_stream):
        if is_stream and object_store.is_remote(path):
            return None
        return [batch.nbytes for batch in _batches(path, reader, is_stream)]


def column_bytes(unit: Unit, keys: Sequence[str]) -> int:
    """Measure the bytes in the columns ``keys`` in the unit's record batches."""
    with _open_arrow(unit.path) as (reader, is_stream):
        readers.check_columns(reader.schema, unit.path, keys)
        batches = enumerate(_batches(unit.path, reader, is_stream, unit.stop))
        return sum(_select_columns(batch, keys).nbytes for idx, batch in batches if idx >= unit.start)


def read_records(unit: Unit, keys: Sequence[str]) -> Iterator[Record]:
    """Read rows from the unit's record batches, each as a JSON object with the columns ``keys``.

    Args:
        keys: column names; "a.b" is the field b in column a.

    Raises:
        DataError: a column is missing or does not contain strings, or the file is damaged.
    """
    with _open_arrow(unit.path) as (reader, is_stream):
        readers.check_columns(reader.schema, unit.path, keys)
        row = 0
        for idx, batch in enumerate(_batches(unit.path, reader, is_stream, unit.stop)):
            if idx < unit.start:
                row += batch.num_rows
                continue
            try:
                columns = _select_columns(batch, keys)
                _check_offsets(columns)
            except (OSError, ValueError) as error:
                raise _damaged_error(
                    unit.path, f"damaged between row {row} and {row + batch.num_rows}", error
                ) from error
            for data in readers.rows_as_json(columns, keys):
                yield Record(unit.path, ROWS, row, data)
                row += 1


def _select_columns(batch: Any, keys: Sequence[str]) -> Any:
    """Select one column for each key, named by the key."""
    import pyarrow
    from pyarrow import compute

    columns = []
    for key in keys:
        first, *fields = [key] if key in batch.schema.names else key.split(".")
        column = batch.column(first)
        for name in fields:
            column = compute.struct_field(column, name)
        columns.append(column)
    return pyarrow.RecordBatch.from_arrays(columns, names=list(keys))


def _check_offsets(batch: Any) -> None:
    """Raise ValueError if a text's offsets are outside its buffer, because reading it could crash the process.

    The columns are checked as binary, because texts that are not UTF-8 are reported row by row later.
    """
    import pyarrow
    from pyarrow import types

    for column in batch.columns:
        if types.is_string(column.type):
            column = column.cast(pyarrow.binary())
        elif types.is_large_string(column.type):
            column = column.cast(pyarrow.large_binary())
        column.validate(full=True)


def _batches(path: str, reader: Any, is_stream: bool, stop: int = sys.maxsize) -> Iterator[Any]:
    """Read the first ``stop`` record batches in a file."""
    idx = 0
    try:
        if is_stream:
            for batch in reader:
                if idx == stop:
                    return
                yield batch
                idx += 1
        else:
            for idx in range(min(stop, reader.num_record_batches)):
                yield reader.get_batch(idx)
    except (OSError, ValueError) as error:
        raise _damaged_error(path, f"damaged or truncated at record batch {idx}", error) from error


@contextmanager
def _open_arrow(path: str) -> Iterator[tuple[Any, bool]]:
    """Open pyarrow's reader, and detect the stream format: (reader, True for a stream)."""
    try:
        import pyarrow
        from pyarrow import ipc
    except ImportError as error:
        raise DataError(f"--input {path} is an Arrow file, which needs pyarrow: pip install -e '.[parquet]'") from error
    with ExitStack() as stack:
        try:
            is_remote = object_store.is_remote(path)
            source: Any = object_store.open_file(path) if is_remote else pyarrow.memory_map(path)
            stack.enter_context(source)
            is_stream = source.read(len(FILE_MAGIC)) != FILE_MAGIC
            source.seek(0)
            options = ipc.IpcReadOptions(use_threads=False)
            reader = (ipc.open_stream if is_stream else ipc.open_file)(source, options=options)
        except (OSError, ValueError) as error:
            raise _damaged_error(path, "damaged", error) from error
        yield reader, is_stream


def _damaged_error(path: str, problem: str, error: Exception) -> DataError:
    return DataError(
        f"--input {path} must be a complete Arrow file; it is {problem} ({error}). Write or download it again"
    )

"""Find input files, divide them into work units, and read a unit's records."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from megatron import log, object_store
from megatron.data.preprocess import arrow_files, readers
from megatron.data.preprocess.encode import parse
from megatron.data.preprocess.foreign_folders import (
    TOOL_FILE_PREFIXES,
    check_is_finished,
    datasets_names_to_skip,
    is_hidden,
    is_log_folder,
)
from megatron.data.preprocess.job_types import FORMATS, STDIN, TABLES, BadRecord, Record, Unit, compression_type
from megatron.data.preprocess.readers import (
    BOM,
    check_decompresses,
    check_is_compressed,
    check_is_lines,
    check_is_text,
    read_files,
    read_head,
    read_lines,
    read_text_blocks,
)
from megatron.errors import DataError

# Corpus files and their formats.

_JSON = (".jsonl", ".json", ".ndjson")
_PARQUET = (".parquet", ".pq")


def find_inputs(paths: Sequence[Path | str]) -> list[Path | str]:
    """Find the files named by ``paths``, in this order; a folder is replaced by all files below it, sorted by path.

    Paths are compared component by component, in code point order. Within folders, names that begin with a dot, or
    with an underscore and contain no "=", are skipped, as in Spark and pyarrow. ``-`` is standard input. A file that
    is named twice is read twice. fsspec URLs (s3://bucket/corpus) are returned as str.

    Raises:
        DataError: a path does not exist or is not a file, a folder has no files or another tool's incomplete output,
            or ``-`` is given twice.
    """
    if sum(str(path) == STDIN for path in paths) > 1:
        raise DataError("--input - (standard input) can be read only once, but was given more than once")
    files: list[Path | str] = []
    for path in paths:
        files += _list_remote_files(str(path)) if object_store.is_remote(path) else _list_files(Path(path))
    if not files:
        raise DataError("--input must name at least one file or folder")
    return files


def _list_files(path: Path) -> list[Path]:
    if str(path) == STDIN or path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(_walk_folder(path, set()), key=lambda file: file.relative_to(path).parts)
        if not files:
            raise DataError(f"--input {path} is a folder without files (hidden files are skipped)")
        return files
    if path.exists():
        raise DataError(
            f"--input {path} must be a file or a folder, got a pipe or a device; use standard input: --input - < {path}"
        )
    raise DataError(f"--input {path} does not exist; check the path")


def _list_remote_files(path: str) -> list[str]:
    """List the files at an fsspec URL, with the same skipped and rejected names as in local folders."""
    if object_store.is_file(path):
        return [path]
    entries = object_store.files_below(path)
    names: dict[str, set[str]] = defaultdict(set)
    for path_parts, _ in entries:
        for depth, name in enumerate(path_parts):
            names["/".join((path.rstrip("/"), *path_parts[:depth]))].add(name)
    for folder, folder_names in names.items():
        check_is_finished(folder, folder_names)
        if {"executor.json", "completions"} <= folder_names:
            raise DataError(f"--input {folder} is the log folder of datatrove. Name the text folders next to it.")
    skipped_paths = {
        object_store.join(folder, name) for folder in names for name in datasets_names_to_skip(folder, names[folder])
    }
    files = [
        name
        for path_parts, name in entries
        if not any(map(is_hidden, path_parts)) and object_store.join(path, *path_parts) not in skipped_paths
    ]
    if not files:
        raise DataError(f"--input {path} is a folder without files (hidden files are skipped)")
    return files


def _walk_folder(folder: Path, seen: set[str]) -> Iterator[Path]:
    """Walk the files below ``folder``; follow symbolic links, and visit each folder once."""
    if (real_path := os.path.realpath(folder)) in seen:
        return
    seen.add(real_path)
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"--input {folder} cannot be read: {error.strerror}") from error
    names = {child.name for child in children}
    check_is_finished(folder, names)
    if is_log_folder(folder, names):
        return
    unknown_names = [
        name for name in sorted(names) if is_hidden(name) and not name.startswith((".", *TOOL_FILE_PREFIXES))
    ]
    if unknown_names:
        log.warning(
            f"{folder}: skipped {', '.join(unknown_names[:5])}{' ...' if unknown_names[5:] else ''}, hidden by an "
            "underscore"
        )
    skipped_names = datasets_names_to_skip(folder, names)
    for child in children:
        if is_hidden(child.name) or child.name in skipped_names:
            continue
        if child.is_dir():
            yield from _walk_folder(child, seen)
        elif child.is_file():
            yield child


def guess_format(path: Path | str) -> str:
    """Guess a file's format by its name, ignoring the suffixes .gz and .zst.

    JSON lines for .jsonl, .json, .ndjson and standard input; parquet for .parquet and .pq; arrow for .arrow; otherwise
    one document per file.
    """
    if str(path) == STDIN:
        return "jsonl"
    uncompressed = Path(path).with_suffix("") if compression_type(path) else Path(path)
    suffix = uncompressed.suffix.lower()
    if suffix in _PARQUET:
        return "parquet"
    if suffix == ".arrow":
        return "arrow"
    return "jsonl" if suffix in _JSON else "text-file"


# Work units.

UNIT_BYTES = 64 << 20
_MIN_UNIT_BYTES = len(BOM) + 1  # a file's first line, after the byte order mark, belongs to the first unit
_END_OF_FILE = sys.maxsize

_READERS: dict[str, Callable[[Unit], Iterator[Record]]] = {
    "jsonl": read_lines,
    "text-block": read_text_blocks,
    "text-file": read_files,
}


def plan_units(paths: Sequence[Path | str], format: str | None, unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """Plan a corpus's units in the order of ``paths``; they depend only on the files and ``unit_bytes``.

    A file that can be read from any byte is divided every ``unit_bytes``; a document belongs to the unit in which it
    begins. A compressed file and standard input are one unit each. Consecutive row groups in a parquet file, record
    batches in an Arrow file, and small one-document files are combined into units of at most ``unit_bytes``.

    Args:
        format: format for all files, one of FORMATS; None: determined by each file's name.

    Raises:
        DataError: a file cannot be read, or its first bytes do not match its name.
    """
    if format is not None and format not in FORMATS:
        raise DataError(f"--format must be one of {', '.join(FORMATS)}, got {format}")
    planned = (
        unit
        for path in find_inputs(paths)
        for unit in _divide_file(str(path), format or guess_format(path), unit_bytes)
    )
    return [replace(unit, idx=idx) for idx, unit in enumerate(_combine_small_files(planned, unit_bytes))]


def read_unit(unit: Unit, keys: Sequence[str] | None = ("text",)) -> Iterator[Record]:
    """Read a unit's records; memory use is a few blocks of 256 kB, or the longest record.

    Args:
        keys: columns to read from parquet and Arrow files; not used for other formats.

    Raises:
        DataError: the file is damaged or no longer readable.
    """
    if unit.format in TABLES:
        return (readers if unit.format == "parquet" else arrow_files).read_records(unit, keys or ("text",))
    return _READERS[unit.format](unit)


def unit_documents(unit: Unit, keys: Sequence[str] | None) -> Iterator[tuple[Record, str | BadRecord]]:
    """Yield (record, text or BadRecord) for a unit's records in order; skip records without text."""
    keys = keys if unit.format in ("jsonl", *TABLES) else None
    is_checked = compression_type(unit.path) is None
    for record in read_unit(unit, keys):
        result = parse(record, keys)
        if isinstance(result, BadRecord):
            # A bad line may be garbage after a flipped bit in a compressed file: verify the file's checksum first.
            if not is_checked:
                check_decompresses(unit.path)
                is_checked = True
            yield record, result
        elif result:
            yield record, result[0]


def _divide_file(path: str, format: str, unit_bytes: int) -> Iterator[Unit]:
    if path == STDIN:
        if format in TABLES:
            raise DataError(f"--input - (standard input) cannot be {format}, which needs random access; name a file")
        yield Unit(0, path, format, 0, _END_OF_FILE, 0)
        return
    head, size = read_head(path), object_store.status(path).size
    if format in TABLES:
        if compression_type(path):
            raise DataError(f"--input {path}: {format} files are compressed internally; unpack the file first")
        group_bytes = readers.row_groups(path) if format == "parquet" else arrow_files.batch_sizes(path)
        if group_bytes is None:
            yield Unit(0, path, format, 0, _END_OF_FILE, size)
        else:
            yield from _combine_row_groups(path, format, group_bytes, unit_bytes)
        return
    check_is_compressed(path, head)
    if compression_type(path) or format == "text-file":
        if not compression_type(path):
            check_is_text(path, head)
        yield Unit(0, path, format, 0, _END_OF_FILE, size)
        return
    check_is_text(path, head)
    if format == "jsonl":
        check_is_lines(path, head)
    unit_bytes = max(unit_bytes, _MIN_UNIT_BYTES)
    for start in range(0, size, unit_bytes):
        yield Unit(0, path, format, start, min(start + unit_bytes, size), min(unit_bytes, size - start))


def _combine_row_groups(path: str, format: str, group_bytes: Sequence[int], unit_bytes: int) -> Iterator[Unit]:
    """Combine consecutive row groups into units of at most ``unit_bytes``, but at least one group.

    Some tools write tiny row groups.

    Args:
        group_bytes: bytes per row group, or per record batch for an Arrow file.
    """
    start = size = 0
    for idx, group_size in enumerate(group_bytes):
        if idx > start and size + group_size > unit_bytes:
            yield Unit(0, path, format, start, idx, size)
            start, size = idx, 0
        size += group_size
    if group_bytes:
        yield Unit(0, path, format, start, len(group_bytes), size)


def _combine_small_files(units: Iterable[Unit], unit_bytes: int) -> Iterator[Unit]:
    """Combine consecutive one-file units with small uncompressed files into units of at most ``unit_bytes``."""
    group: list[Unit] = []
    size = 0
    for unit in units:
        is_joinable = unit.format == "text-file" and unit.path != STDIN and compression_type(unit.path) is None
        if group and (not is_joinable or size + unit.size > unit_bytes):
            yield _merge_units(group)
            group, size = [], 0
        if is_joinable:
            group.append(unit)
            size += unit.size
        else:
            yield unit
    if group:
        yield _merge_units(group)


def _merge_units(group: list[Unit]) -> Unit:
    """Merge all files in ``group`` into one unit."""
    return replace(group[0], size=sum(unit.size for unit in group), more_paths=tuple(unit.path for unit in group[1:]))

"""Which files a corpus is made of, and the format of each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.data.preprocess.records import STDIN, compression_of
from megatron.errors import DataError

_JSON = (".jsonl", ".json", ".ndjson")
_PARQUET = (".parquet", ".pq")


def find_inputs(paths: Sequence[Path | str]) -> list[Path]:
    """Return the files that ``paths`` name, in their order; a folder gives all files below it, sorted by their paths.

    Names that begin with a dot are left out of folders. ``-`` is standard input. What is named twice is read twice.

    Raises:
        DataError: a path does not exist or is no file, a folder holds no file, or ``-`` is given twice.
    """
    if sum(str(path) == STDIN for path in paths) > 1:
        raise DataError("--input - (standard input) can be read once only; it was given more than once")
    found = [file for path in paths for file in _files_of(Path(path))]
    if not found:
        raise DataError("--input must name at least one file or folder")
    return found


def _files_of(path: Path) -> list[Path]:
    if str(path) == STDIN or path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(_walk(path, set()), key=lambda file: file.relative_to(path).parts)
        if not found:
            raise DataError(f"--input {path} is a folder without any file (hidden ones are left out)")
        return found
    if path.exists():
        raise DataError(
            f"--input {path} must be a file or a folder, got a pipe or a device; "
            "give it on standard input: --input - < that"
        )
    raise DataError(f"--input {path} does not exist; check the path")


def _walk(folder: Path, seen: set[str]) -> Iterator[Path]:
    """Yield the files below ``folder``, links followed, each folder once."""
    if (real := os.path.realpath(folder)) in seen:
        return
    seen.add(real)
    try:
        children = list(folder.iterdir())
    except OSError as error:
        raise DataError(f"--input {folder} cannot be read: {error.strerror}") from error
    for child in sorted(children):
        if child.name.startswith("."):
            continue
        if child.is_dir():
            yield from _walk(child, seen)
        elif child.is_file():
            yield child


def guess_format(path: Path | str) -> str:
    """Return the format of one file by its name, the endings .gz and .zst looked through.

    JSON lines for .jsonl, .json, .ndjson and for standard input; parquet for .parquet, .pq; else a document per file.
    """
    if str(path) == STDIN:
        return "jsonl"
    inner = Path(path).with_suffix("") if compression_of(path) else Path(path)
    suffix = inner.suffix.lower()
    if suffix in _PARQUET:
        return "parquet"
    return "jsonl" if suffix in _JSON else "text-file"

"""``PREFIX.bad.jsonl``: a line of JSON for each record that could not be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from megatron import files
from megatron.data import commit
from megatron.data.preprocess.parts import Parts
from megatron.data.preprocess.records import ROWS, BadRecord, Unit
from megatron.data.streamed_file import StreamedFile

_SHOWN = 20
_READ_AT_ONCE = 1 << 22


def path_of(prefix: str) -> Path:
    """Return where the bad records of a job are told."""
    return Path(prefix + ".bad.jsonl")


def gather(prefix: str, parts: Parts, units: Sequence[Unit]) -> list[str]:
    """Write what all parts say, in the order of the units, finished or not, and return the first ones in words.

    An older file goes where nothing is bad.
    """
    target = path_of(prefix)
    records = _records(parts, units)
    first = next(records, None)
    if first is None:
        with suppress(FileNotFoundError):
            files.remove_file(target)
        return []
    shown = [first]
    temporary = commit.temporary_path(target)
    try:
        with StreamedFile(temporary) as file:
            file.write(orjson.dumps(first) + b"\n")
            for record in records:
                file.write(orjson.dumps(record) + b"\n")
                shown += [record] if len(shown) < _SHOWN else []
            file.sync()
        files.rename(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return [_in_words(record) for record in shown]


def _records(parts: Parts, units: Sequence[Unit]) -> Iterator[dict[str, Any]]:
    lines = _Lines()
    for unit in units:
        for line in parts.bad_lines(unit.number):
            record = orjson.loads(line)
            if record.get("line") == 0:
                record["line"] = lines.number(record["file"], record["byte_offset"])
            yield record


def _in_words(record: dict[str, Any]) -> str:
    place = record["row"] if "row" in record else record["byte_offset"]
    return str(BadRecord(record["file"], record.get("line", ROWS), place, record["reason"], record["opening"]))


class _Lines:
    """Counts lines up to places that rise within a file: a unit that begins in the middle of one cannot know them."""

    def __init__(self) -> None:
        self._path, self._offset, self._line = "", 0, 1
        self._file: BinaryIO | None = None

    def number(self, path: str, offset: int) -> int:
        """Return the number of the line that begins at ``offset``, 0 if the file cannot be read any more."""
        try:
            if path != self._path or self._file is None or offset < self._offset:
                self._open(path)
            self._advance(offset)
        except OSError:
            return 0
        return self._line

    def _open(self, path: str) -> None:
        if self._file:
            self._file.close()
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - one file at a time, closed above
        self._path, self._offset, self._line = path, 0, 1

    def _advance(self, offset: int) -> None:
        assert self._file is not None, "number() opens it"
        while self._offset < offset and (data := self._file.read(min(_READ_AT_ONCE, offset - self._offset))):
            self._line += data.count(b"\n")
            self._offset += len(data)

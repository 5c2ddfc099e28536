"""Finished units in PREFIX.parts, and records that could not be used."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import orjson

from megatron import files
from megatron.data import file_io
from megatron.data.file_io import StreamedFile
from megatron.data.preprocess.encode import Encoded
from megatron.data.preprocess.job_types import ROWS, BadRecord, Counts, Unit
from megatron.errors import DataError

# What finished units leave in ``PREFIX.parts``, so that a job that was cut off goes on with them.
#
# | file | content |
# |---|---|
# | unit-000000.bin | tokens, in the type of the final ``.bin`` |
# | unit-000000.len | tokens of each document, int32 |
# | unit-000000.bad | bad records, a line of JSON each |
# | unit-000000.json | counts, and size and crc32 of the three; renamed into place last: the unit is finished |
# | plan.json | what the job is (``plan``) |
# | lock | held by the job while it runs |
#
# Nothing here is flushed to the disk: after a power cut a part that was lost is found out by its size and crc32, and
# done again.

KINDS = ("bin", "len", "bad")
PLAN, LOCK = "plan.json", "lock"


@dataclasses.dataclass(frozen=True)
class Part:
    """A finished unit: what it counts, and the (bytes, crc32) of its files by kind."""

    unit: int
    counts: Counts
    facts: dict[str, tuple[int, int]]

    def to_json(self) -> bytes:
        return json.dumps({"unit": self.unit, "counts": self.counts._asdict(), "files": self.facts}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Part:
        fields = json.loads(data)
        facts = {kind: (int(size), int(crc32)) for kind, (size, crc32) in fields["files"].items()}
        return cls(fields["unit"], Counts(**fields["counts"]), facts)


class ShardFolder:
    """The folder of the parts of one job; ``dtype`` is the type of its tokens."""

    def __init__(self, prefix: str, dtype: np.dtype) -> None:
        self.folder, self.dtype = folder_of(prefix), dtype

    def path(self, unit: int, kind: str) -> Path:
        """Return where a file of a unit lies once it is finished."""
        return self.folder / f"unit-{unit:06d}.{kind}"

    def finished(self, unit: int) -> Part | None:
        """Return the part of ``unit`` if it is there with the size and crc32 that it must have."""
        try:
            part = Part.from_json(self.path(unit, "json").read_bytes())
            is_whole = part.unit == unit and set(part.facts) == set(KINDS)
            for kind, facts in part.facts.items():
                path = self.path(unit, kind)
                is_whole = is_whole and path.stat().st_size == facts[0] and files.size_and_crc(path) == facts
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return part if is_whole else None

    def has_any(self) -> bool:
        """Return whether a unit is finished."""
        return any(self.folder.glob("unit-*.json"))

    def bad_lines(self, unit: int) -> Iterator[bytes]:
        """Yield the whole lines of JSON about the bad records of a unit, finished or not."""
        for path in (self.path(unit, "bad"), temporary(self.path(unit, "bad"))):
            if path.exists():
                with open(path, "rb") as file:
                    yield from (line for line in file if line.endswith(b"\n"))
                return

    def remove(self) -> None:
        """Delete all parts."""
        remove(self.folder)


class PartWriter:
    """Writes the part of one unit; it counts for nothing until ``finish``."""

    def __init__(self, parts: ShardFolder, unit: int) -> None:
        self._parts, self._unit = parts, unit
        self.counts = Counts()
        self._open = ExitStack()

    def __enter__(self) -> PartWriter:
        with suppress(FileNotFoundError):
            files.remove_file(self._parts.path(self._unit, "json"))  # a part that did not verify
        self._files = {
            kind: self._open.enter_context(StreamedFile(temporary(self._parts.path(self._unit, kind))))
            for kind in KINDS
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # a full disk fails a second time when what is buffered is written on closing
            self._open.close()
        if kind is not None:
            for name in ("bin", "len"):  # room for others; what is bad is still to be told
                temporary(self._parts.path(self._unit, name)).unlink(missing_ok=True)

    def add(self, encoded: Encoded, counts: Counts) -> None:
        """Append a chunk; ``counts`` are those of all chunks so far. Bad records are there at once for all to read."""
        if len(encoded.tokens):
            self._files["bin"].write(encoded.tokens.astype(self._parts.dtype).data.cast("B"))
            self._files["len"].write(encoded.sizes.astype("<i4").data.cast("B"))
        if encoded.bad:
            self._files["bad"].write(b"".join(orjson.dumps(bad.to_json()) + b"\n" for bad in encoded.bad))
            self._files["bad"].flush()
        self.counts = counts

    def finish(self) -> Part:
        """Put the part in place."""
        self._open.close()
        facts = {kind: (file.size, file.crc32) for kind, file in self._files.items()}
        part = Part(self._unit, self.counts, facts)
        for kind in KINDS:
            _rename(self._parts.path(self._unit, kind))
        last = self._parts.path(self._unit, "json")
        with StreamedFile(temporary(last)) as file:
            file.write(part.to_json())
        _rename(last)
        return part


def folder_of(prefix: str) -> Path:
    """Return the folder of the parts of a job."""
    return Path(prefix + ".parts")


def temporary(path: Path) -> Path:
    """Return the name that a file of a part has while it is written."""
    return path.with_name(path.name + ".tmp")


def _rename(path: Path) -> None:
    files.before_operation("rename", path)
    os.replace(temporary(path), path)


def remove(folder: Path) -> None:
    """Delete all parts in ``folder``, what ``--resume`` needs last: a kill leaves parts that can still be used.

    The lock stays; who holds it removes it with the folder.

    Raises:
        DataError: something else lies there.
    """
    names = sorted(path.name for path in folder.iterdir())
    units = [name for name in names if name.startswith("unit-")]
    plans = [name for name in names if name == PLAN or name.startswith(f".{PLAN}.tmp")]
    if foreign := sorted(set(names) - {*units, *plans, LOCK}):
        raise DataError(f"{folder} must hold nothing but parts, got {', '.join(foreign[:5])}. Move that elsewhere.")
    for name in [*units, *plans]:
        files.remove_file(folder / name)


# ``PREFIX.bad.jsonl``: a line of JSON for each record that could not be used.

_SHOWN = 20
_READ_AT_ONCE = 1 << 22


def path_of(prefix: str) -> Path:
    """Return where the bad records of a job are told."""
    return Path(prefix + ".bad.jsonl")


def gather(prefix: str, parts: ShardFolder, units: Sequence[Unit]) -> list[str]:
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
    temporary = file_io.temporary_path(target)
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


def _records(parts: ShardFolder, units: Sequence[Unit]) -> Iterator[dict[str, Any]]:
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

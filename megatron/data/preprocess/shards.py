"""Finished units in PREFIX.parts, and records that could not be used."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import numpy as np
import orjson

from megatron import files, object_store
from megatron.data import file_io
from megatron.data.file_io import StreamedFile
from megatron.data.preprocess.encode import Encoded
from megatron.data.preprocess.job_types import ROWS, BadRecord, Counts
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
# | lock, part-3-of-16.lock | held by the job while it runs |
#
# On one machine nothing here is flushed to the disk: after a power cut a part that was lost is found out by its size
# and crc32, and done again. In a folder that several machines fill the four are flushed before a unit counts as
# finished, since whoever joins them has another machine's word for it.
#
# Two processes may make one unit at a time (a machine that was taken for lost goes on): each writes under names of its
# own, and both rename the same bytes into place.

KINDS = ("bin", "len", "bad")
PLAN, LOCK = "plan.json", "lock"
_UNFINISHED = re.compile(r"unit-([0-9]{6,})\.[a-z]+\.tmp-")


@dataclasses.dataclass(frozen=True)
class Part:
    """A finished unit: what it counts, the (bytes, crc32) of its files by kind, the digest of the plan it is of."""

    unit: int
    counts: Counts
    facts: dict[str, tuple[int, int]]
    plan: str = ""

    def to_json(self) -> bytes:
        fields = {"unit": self.unit, "plan": self.plan, "counts": self.counts._asdict(), "files": self.facts}
        return json.dumps(fields).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Part:
        fields = json.loads(data)
        facts = {kind: (int(size), int(crc32)) for kind, (size, crc32) in fields["files"].items()}
        return cls(fields["unit"], Counts(**fields["counts"]), facts, fields["plan"])


class ShardFolder:
    """The folder of the parts of one job.

    Args:
        dtype: type of the tokens.
        plan: digest of the plan; finished units of another one do not count.
        is_shared: several machines write here.
    """

    def __init__(self, folder: Path, dtype: np.dtype, plan: str, *, is_shared: bool = False) -> None:
        self.folder, self.dtype, self.plan, self.is_shared = folder, dtype, plan, is_shared

    def path(self, unit: int, kind: str) -> Path:
        """Return where a file of a unit lies once it is finished."""
        return self.folder / f"unit-{unit:06d}.{kind}"

    def finished(self, unit: int) -> Part | None:
        """Return the part of ``unit`` if it is there with the size and crc32 that it must have."""
        found = self.look_at(unit)
        return found if isinstance(found, Part) else None

    def look_at(self, unit: int) -> Part | Literal["missing", "damaged", "of another job"]:
        """Return the part of ``unit``, read through, or what is the matter with it."""
        try:
            part = Part.from_json(self.path(unit, "json").read_bytes())
            is_whole = part.unit == unit and set(part.facts) == set(KINDS)
            if part.plan != self.plan:
                return "of another job"
            for kind, facts in part.facts.items():
                path = self.path(unit, kind)
                is_whole = is_whole and path.stat().st_size == facts[0] and files.size_and_crc(path) == facts
        except FileNotFoundError:
            return "damaged" if self.path(unit, "json").exists() else "missing"
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return "damaged"
        return part if is_whole else "damaged"

    def bad_lines(self, unit: int, unfinished: Sequence[Path] = ()) -> Iterator[bytes]:
        """Yield the whole lines of JSON about the bad records of a unit, finished or not."""
        for path in (self.path(unit, "bad"), *unfinished):
            if path.exists():
                with open(path, "rb") as file:
                    yield from (line for line in file if line.endswith(b"\n"))
                return

    def unfinished(self) -> dict[int, list[Path]]:
        """Return the files of each unit that is being written, or was when its writer was killed."""
        found: dict[int, list[Path]] = defaultdict(list)
        for path in self.folder.iterdir():
            if name := _UNFINISHED.match(path.name):
                found[int(name[1])].append(path)
        return found

    def unfinished_bad(self) -> dict[int, list[Path]]:
        """Return those of bad records, the latest of each unit first."""
        return {
            unit: sorted((path for path in paths if ".bad.tmp-" in path.name), key=_time_of, reverse=True)
            for unit, paths in self.unfinished().items()
        }

    def remove(self) -> None:
        """Delete all parts."""
        remove(self.folder)


def _time_of(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # it has just been finished, or given up
        return 0


_numbers = itertools.count()


class PartWriter:
    """Writes the part of one unit; it counts for nothing until ``finish``."""

    def __init__(self, parts: ShardFolder, unit: int) -> None:
        self._parts, self._unit = parts, unit
        self._mark = f"{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
        self.counts = Counts()
        self._open = ExitStack()

    def __enter__(self) -> PartWriter:
        with suppress(FileNotFoundError):
            files.remove_file(self._parts.path(self._unit, "json"))  # a part that did not verify
        self._files = {kind: self._open.enter_context(StreamedFile(self._temporary(kind))) for kind in KINDS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # a full disk fails a second time when what is buffered is written on closing
            self._open.close()
        if kind is not None:
            for name in ("bin", "len"):  # room for others; what is bad is still to be told
                self._temporary(name).unlink(missing_ok=True)

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
        if self._parts.is_shared:
            for file in self._files.values():
                file.sync()
        self._open.close()
        facts = {kind: (file.size, file.crc32) for kind, file in self._files.items()}
        part = Part(self._unit, self.counts, facts, self._parts.plan)
        for kind in KINDS:
            self._rename(kind)
        with StreamedFile(self._temporary("json")) as file:
            file.write(part.to_json())
            if self._parts.is_shared:
                file.sync()
        self._rename("json")
        if self._parts.is_shared:
            files.sync_folder(self._parts.folder)
        return part

    def _temporary(self, kind: str) -> Path:
        """Return the name that a file has while it is written, which no other writer uses."""
        path = self._parts.path(self._unit, kind)
        return path.with_name(f"{path.name}.tmp-{self._mark}")

    def _rename(self, kind: str) -> None:
        path = self._parts.path(self._unit, kind)
        files.before_operation("rename", path)
        os.replace(self._temporary(kind), path)


def folder_of(prefix: str) -> Path:
    """Return the folder of the parts of a job."""
    return Path(prefix + ".parts")


def remove(folder: Path) -> None:
    """Delete all parts in ``folder``, what ``--resume`` needs last: a kill leaves parts that can still be used.

    The lock stays; who holds it removes it with the folder.

    Raises:
        DataError: something else lies there.
    """
    names = sorted(path.name for path in folder.iterdir())
    units = [name for name in names if name.startswith("unit-")]
    locks = [name for name in names if name.startswith("part-") and name.endswith(".lock")]  # left by a kill
    plans = [name for name in names if name == PLAN or name.startswith(f".{PLAN}.tmp")]
    if foreign := sorted(set(names) - {*units, *locks, *plans, LOCK}):
        raise DataError(f"{folder} must hold nothing but parts, got {', '.join(foreign[:5])}. Move that elsewhere.")
    for name in [*units, *locks, *plans]:
        files.remove_file(folder / name)


# ``PREFIX.bad.jsonl``: a line of JSON for each record that could not be used.

_SHOWN = 20
_READ_AT_ONCE = 1 << 22


def path_of(prefix: str) -> Path:
    """Return where the bad records of a job are told."""
    return Path(prefix + ".bad.jsonl")


def gather(prefix: str, parts: ShardFolder, units: Iterable[int]) -> list[str]:
    """Write what the parts of ``units`` say, in this order, finished or not, and return the first ones in words.

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


def _records(parts: ShardFolder, units: Iterable[int]) -> Iterator[dict[str, Any]]:
    lines, unfinished = _Lines(), parts.unfinished_bad()
    for unit in units:
        for line in parts.bad_lines(unit, unfinished.get(unit, ())):
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
        except (OSError, DataError):
            return 0
        return self._line

    def _open(self, path: str) -> None:
        if self._file:
            self._file.close()
        self._file = object_store.open_file(path, buffering=0)  # noqa: SIM115 - one file at a time, closed above
        self._path, self._offset, self._line = path, 0, 1

    def _advance(self, offset: int) -> None:
        assert self._file is not None, "number() opens it"
        while self._offset < offset and (data := self._file.read(min(_READ_AT_ONCE, offset - self._offset))):
            self._line += data.count(b"\n")
            self._offset += len(data)

"""The parts of finished units in PREFIX.parts, and the list of bad records."""

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

# The folder ``PREFIX.parts``, from which an interrupted job is resumed.
#
# | file | content |
# |---|---|
# | unit-000000.bin | tokens, in the type of the final ``.bin`` |
# | unit-000000.len | number of tokens of each document, int32 |
# | unit-000000.bad | bad records, one line of JSON each |
# | unit-000000.json | counts, and size and crc32 of the other three files; renamed last, which finishes the unit |
# | plan.json | the identity of the job (``plan``) |
# | lock, part-3-of-16.lock | locked by the job while it runs |
#
# If a single machine writes the folder, the files are not fsynced: parts that are lost in a power failure are detected
# by their size and crc32, and encoded again. If several machines write the folder, the four files are fsynced before a
# unit counts as finished, because the machine that merges the parts must be able to rely on them.
#
# Two processes may encode the same unit concurrently (if a machine is considered lost but continues). Each of them
# writes under its own temporary names, and both rename files with the same content.

KINDS = ("bin", "len", "bad")
PLAN, LOCK = "plan.json", "lock"
_UNFINISHED = re.compile(r"unit-([0-9]{6,})\.[a-z]+\.tmp-")


@dataclasses.dataclass(frozen=True)
class Part:
    """A finished unit.

    Args:
        facts: (bytes, crc32) of each of its files, by kind.
        plan: digest of the plan that the unit belongs to.
    """

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
        plan: digest of the plan; finished units of other plans are ignored.
        is_shared: several machines write the folder.
    """

    def __init__(self, folder: Path, dtype: np.dtype, plan: str, *, is_shared: bool = False) -> None:
        self.folder, self.dtype, self.plan, self.is_shared = folder, dtype, plan, is_shared

    def path(self, unit: int, kind: str) -> Path:
        """Return the final path of a file of a unit."""
        return self.folder / f"unit-{unit:06d}.{kind}"

    def finished(self, unit: int) -> Part | None:
        """Return the part of ``unit`` if its files have the recorded sizes and checksums; else None."""
        part = self.look_at(unit)
        return part if isinstance(part, Part) else None

    def look_at(self, unit: int) -> Part | Literal["missing", "damaged", "of another job"]:
        """Verify the checksums of ``unit`` and return its part, or the problem as text."""
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
        """Yield the complete JSON lines about the bad records of a unit, finished or not."""
        for path in (self.path(unit, "bad"), *unfinished):
            if path.exists():
                with open(path, "rb") as file:
                    yield from (line for line in file if line.endswith(b"\n"))
                return

    def unfinished(self) -> dict[int, list[Path]]:
        """Return unit -> temporary files of the units that are being written, or whose writer was killed."""
        paths_by_unit: dict[int, list[Path]] = defaultdict(list)
        for path in self.folder.iterdir():
            if name := _UNFINISHED.match(path.name):
                paths_by_unit[int(name[1])].append(path)
        return paths_by_unit

    def unfinished_bad(self) -> dict[int, list[Path]]:
        """Return unit -> temporary files of bad records, the latest first."""
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
    except FileNotFoundError:  # another process has just renamed or deleted it
        return 0


_numbers = itertools.count()


class PartWriter:
    """A writer of the part of one unit; the part is ignored until ``finish``."""

    def __init__(self, parts: ShardFolder, unit: int) -> None:
        self._parts, self._unit = parts, unit
        self._mark = f"{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
        self.counts = Counts()
        self._open = ExitStack()

    def __enter__(self) -> PartWriter:
        with suppress(FileNotFoundError):
            files.remove_file(self._parts.path(self._unit, "json"))  # left by a part that failed verification
        self._files = {kind: self._open.enter_context(StreamedFile(self._temporary(kind))) for kind in KINDS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # on a full disk, flushing the buffers on close fails a second time
            self._open.close()
        if kind is not None:
            for name in ("bin", "len"):  # free disk space, but keep the list of bad records
                self._temporary(name).unlink(missing_ok=True)

    def add(self, encoded: Encoded, counts: Counts) -> None:
        """Append a chunk; ``counts`` covers all chunks so far. Other processes can read its bad records immediately."""
        if len(encoded.tokens):
            self._files["bin"].write(encoded.tokens.astype(self._parts.dtype).data.cast("B"))
            self._files["len"].write(encoded.sizes.astype("<i4").data.cast("B"))
        if encoded.bad:
            self._files["bad"].write(b"".join(orjson.dumps(bad.to_json()) + b"\n" for bad in encoded.bad))
            self._files["bad"].flush()
        self.counts = counts

    def finish(self) -> Part:
        """Rename the files of the part to their final names and return the part."""
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
        """Return the temporary path of a file, which is unique to this writer."""
        path = self._parts.path(self._unit, kind)
        return path.with_name(f"{path.name}.tmp-{self._mark}")

    def _rename(self, kind: str) -> None:
        path = self._parts.path(self._unit, kind)
        files.before_operation("rename", path)
        os.replace(self._temporary(kind), path)


def folder_of(prefix: str) -> Path:
    """Return the folder of the parts for an output prefix."""
    return Path(prefix + ".parts")


def remove(folder: Path) -> None:
    """Delete all parts in ``folder``, and then the plan, so that an interrupted deletion leaves resumable parts.

    The lock file is not deleted; its holder removes it together with the folder.

    Raises:
        DataError: the folder contains other files.
    """
    names = sorted(path.name for path in folder.iterdir())
    units = [name for name in names if name.startswith("unit-")]
    locks = [name for name in names if name.startswith("part-") and name.endswith(".lock")]  # left by a killed job
    plans = [name for name in names if name == PLAN or name.startswith(f".{PLAN}.tmp")]
    if foreign := sorted(set(names) - {*units, *locks, *plans, LOCK}):
        raise DataError(f"{folder} must contain only parts, got {', '.join(foreign[:5])}. Move them elsewhere.")
    for name in [*units, *locks, *plans]:
        files.remove_file(folder / name)


# ``PREFIX.bad.jsonl``: one line of JSON for each bad record.

_SHOWN = 20
_READ_AT_ONCE = 1 << 22


def path_of(prefix: str) -> Path:
    """Return the path of the file that lists the bad records of a job."""
    return Path(prefix + ".bad.jsonl")


def gather(prefix: str, parts: ShardFolder, units: Iterable[int]) -> list[str]:
    """Write the bad records of ``units``, finished or not, in this order, and return descriptions of the first ones.

    If there are no bad records, an existing file is deleted.
    """
    target = path_of(prefix)
    records = _records(parts, units)
    first = next(records, None)
    if first is None:
        with suppress(FileNotFoundError):
            files.remove_file(target)
        return []
    examples = [first]
    temporary = file_io.temporary_path(target)
    try:
        with StreamedFile(temporary) as file:
            file.write(orjson.dumps(first) + b"\n")
            for record in records:
                file.write(orjson.dumps(record) + b"\n")
                examples += [record] if len(examples) < _SHOWN else []
            file.sync()
        files.rename(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return [_in_words(record) for record in examples]


def _records(parts: ShardFolder, units: Iterable[int]) -> Iterator[dict[str, Any]]:
    lines, unfinished = _Lines(), parts.unfinished_bad()
    for unit in units:
        for line in parts.bad_lines(unit, unfinished.get(unit, ())):
            record = orjson.loads(line)
            if record.get("line") == 0:
                record["line"] = lines.number(record["file"], record["byte_offset"])
            yield record


def _in_words(record: dict[str, Any]) -> str:
    """Format a bad record as in ``BadRecord.__str__``."""
    position = record["row"] if "row" in record else record["byte_offset"]
    return str(BadRecord(record["file"], record.get("line", ROWS), position, record["reason"], record["opening"]))


class _Lines:
    """A counter that maps ascending byte offsets in a file to line numbers.

    It is needed because records of a unit that begins within a file have no line number.
    """

    def __init__(self) -> None:
        self._path, self._offset, self._line = "", 0, 1
        self._file: BinaryIO | None = None

    def number(self, path: str, offset: int) -> int:
        """Return the number of the line that begins at ``offset``; 0 if the file is no longer readable."""
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

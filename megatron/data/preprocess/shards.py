"""Finished units' shards in PREFIX.parts, and the bad record list."""

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
# | unit-000000.len | tokens per document, int32 |
# | unit-000000.bad | bad records, one JSON line each |
# | unit-000000.json | counts, and size and crc32 of the other three files; renamed last, which finishes the unit |
# | plan.json | the job's identity (``plan``) |
# | lock, part-3-of-16.lock | locked by the job while it runs |
#
# If a single machine writes the folder, the files are not fsynced: shards lost in a power failure are detected by
# their size and crc32, and encoded again. If several machines write the folder, the four files are fsynced before a
# unit counts as finished, because the machine that merges the shards must be able to rely on them.
#
# Two processes may encode the same unit concurrently (if a machine is considered lost but continues). Each of them
# writes under its own temporary names, and both rename files with the same content.

FILE_TYPES = ("bin", "len", "bad")
PLAN, LOCK = "plan.json", "lock"
_UNFINISHED = re.compile(r"unit-([0-9]{6,})\.[a-z]+\.tmp-")


@dataclasses.dataclass(frozen=True)
class Shard:
    """A finished unit's encoded documents.

    Args:
        file_stats: (bytes, crc32) per file, by ``FILE_TYPES``.
        plan: digest of the unit's plan.
    """

    unit: int
    counts: Counts
    file_stats: dict[str, tuple[int, int]]
    plan: str = ""

    def to_json(self) -> bytes:
        fields = {"unit": self.unit, "plan": self.plan, "counts": self.counts._asdict(), "files": self.file_stats}
        return json.dumps(fields).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Shard:
        fields = json.loads(data)
        file_stats = {file_type: (int(size), int(crc32)) for file_type, (size, crc32) in fields["files"].items()}
        return cls(fields["unit"], Counts(**fields["counts"]), file_stats, fields["plan"])


class ShardFolder:
    """The shard folder of one job.

    Args:
        dtype: token type.
        plan: plan digest; other plans' finished units are ignored.
        is_shared: several machines write the folder.
    """

    def __init__(self, folder: Path, dtype: np.dtype, plan: str, *, is_shared: bool = False) -> None:
        self.folder, self.dtype, self.plan, self.is_shared = folder, dtype, plan, is_shared

    def path(self, unit: int, file_type: str) -> Path:
        """Return the final path of a unit's file."""
        return self.folder / f"unit-{unit:06d}.{file_type}"

    def load_finished(self, unit: int) -> Shard | None:
        """Load the shard for ``unit`` if its files have the recorded sizes and checksums; else None."""
        shard = self.verify_unit(unit)
        return shard if isinstance(shard, Shard) else None

    def verify_unit(self, unit: int) -> Shard | Literal["missing", "damaged", "of another job"]:
        """Verify the checksums of ``unit``; the result is its shard, or the problem as text."""
        try:
            shard = Shard.from_json(self.path(unit, "json").read_bytes())
            is_complete = shard.unit == unit and set(shard.file_stats) == set(FILE_TYPES)
            if shard.plan != self.plan:
                return "of another job"
            for file_type, stats in shard.file_stats.items():
                path = self.path(unit, file_type)
                is_complete = is_complete and path.stat().st_size == stats[0] and files.size_and_crc(path) == stats
        except FileNotFoundError:
            return "damaged" if self.path(unit, "json").exists() else "missing"
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return "damaged"
        return shard if is_complete else "damaged"

    def bad_lines(self, unit: int, unfinished: Sequence[Path] = ()) -> Iterator[bytes]:
        """Read the complete JSON lines about a unit's bad records, finished or not."""
        for path in (self.path(unit, "bad"), *unfinished):
            if path.exists():
                with open(path, "rb") as file:
                    yield from (line for line in file if line.endswith(b"\n"))
                return

    def unfinished_files(self) -> dict[int, list[Path]]:
        """Map units that are being written, or whose writer was killed, to their temporary files."""
        paths_by_unit: dict[int, list[Path]] = defaultdict(list)
        for path in self.folder.iterdir():
            if match := _UNFINISHED.match(path.name):
                paths_by_unit[int(match[1])].append(path)
        return paths_by_unit

    def unfinished_bad_files(self) -> dict[int, list[Path]]:
        """Map units to their temporary bad record files, the latest first."""
        return {
            unit: sorted((path for path in paths if ".bad.tmp-" in path.name), key=_mtime_ns, reverse=True)
            for unit, paths in self.unfinished_files().items()
        }

    def remove(self) -> None:
        """Delete all shards."""
        remove_shards(self.folder)


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # another process has just renamed or deleted it
        return 0


_writer_ids = itertools.count()


class ShardWriter:
    """Writes one unit's shard, which is ignored until ``finish``."""

    def __init__(self, shard_folder: ShardFolder, unit: int) -> None:
        self._shard_folder, self._unit = shard_folder, unit
        self._writer_id = f"{socket.gethostname()}-{os.getpid()}-{next(_writer_ids)}"
        self.counts = Counts()
        self._open_files = ExitStack()

    def __enter__(self) -> ShardWriter:
        with suppress(FileNotFoundError):
            files.remove_file(self._shard_folder.path(self._unit, "json"))  # left by a shard that failed verification
        self._files = {
            file_type: self._open_files.enter_context(StreamedFile(self._temporary_path(file_type)))
            for file_type in FILE_TYPES
        }
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # on a full disk, flushing the buffers on close fails a second time
            self._open_files.close()
        if error_type is not None:
            for file_type in ("bin", "len"):  # free disk space, but keep the list of bad records
                self._temporary_path(file_type).unlink(missing_ok=True)

    def add(self, encoded: Encoded, counts: Counts) -> None:
        """Append a chunk; ``counts`` covers all chunks so far. Other processes can read its bad records immediately."""
        if len(encoded.tokens):
            self._files["bin"].write(encoded.tokens.astype(self._shard_folder.dtype).data.cast("B"))
            self._files["len"].write(encoded.lengths.astype("<i4").data.cast("B"))
        if encoded.bad_records:
            self._files["bad"].write(
                b"".join(orjson.dumps(bad_record.to_json()) + b"\n" for bad_record in encoded.bad_records)
            )
            self._files["bad"].flush()
        self.counts = counts

    def finish(self) -> Shard:
        """Rename the shard's files to their final names and return the shard."""
        if self._shard_folder.is_shared:
            for file in self._files.values():
                file.sync()
        self._open_files.close()
        file_stats = {file_type: (file.size, file.crc32) for file_type, file in self._files.items()}
        shard = Shard(self._unit, self.counts, file_stats, self._shard_folder.plan)
        for file_type in FILE_TYPES:
            self._rename(file_type)
        with StreamedFile(self._temporary_path("json")) as file:
            file.write(shard.to_json())
            if self._shard_folder.is_shared:
                file.sync()
        self._rename("json")
        if self._shard_folder.is_shared:
            files.sync_folder(self._shard_folder.folder)
        return shard

    def _temporary_path(self, file_type: str) -> Path:
        """Choose a file's temporary path, which is unique to this writer."""
        path = self._shard_folder.path(self._unit, file_type)
        return path.with_name(f"{path.name}.tmp-{self._writer_id}")

    def _rename(self, file_type: str) -> None:
        path = self._shard_folder.path(self._unit, file_type)
        files.before_operation("rename", path)
        os.replace(self._temporary_path(file_type), path)


def shard_folder_path(prefix: str) -> Path:
    """Return the shard folder for an output prefix."""
    return Path(prefix + ".parts")


def remove_shards(folder: Path) -> None:
    """Delete all shards in ``folder``, and then the plan, so that an interrupted deletion leaves resumable shards.

    The lock file is not deleted; its holder removes it together with the folder.

    Raises:
        DataError: the folder contains other files.
    """
    names = sorted(path.name for path in folder.iterdir())
    units = [name for name in names if name.startswith("unit-")]
    locks = [name for name in names if name.startswith("part-") and name.endswith(".lock")]  # left by a killed job
    plans = [name for name in names if name == PLAN or name.startswith(f".{PLAN}.tmp")]
    if foreign_names := sorted(set(names) - {*units, *locks, *plans, LOCK}):
        raise DataError(f"{folder} must contain only parts, got {', '.join(foreign_names[:5])}. Move them elsewhere.")
    for name in [*units, *locks, *plans]:
        files.remove_file(folder / name)


# ``PREFIX.bad.jsonl``: one JSON line for each bad record.

_MAX_EXAMPLES = 20
_READ_BYTES = 1 << 22


def bad_records_path(prefix: str) -> Path:
    """Choose the path for a job's bad record list."""
    return Path(prefix + ".bad.jsonl")


def collect_bad_records(prefix: str, shard_folder: ShardFolder, units: Iterable[int]) -> list[str]:
    """Write the bad records of ``units``, finished or not, in this order, and describe the first ones.

    If there are no bad records, an existing file is deleted.
    """
    target = bad_records_path(prefix)
    records = _bad_records(shard_folder, units)
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
                examples += [record] if len(examples) < _MAX_EXAMPLES else []
            file.sync()
        files.rename(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return [_format_record(record) for record in examples]


def _bad_records(shard_folder: ShardFolder, units: Iterable[int]) -> Iterator[dict[str, Any]]:
    line_counter, unfinished = _LineCounter(), shard_folder.unfinished_bad_files()
    for unit in units:
        for line in shard_folder.bad_lines(unit, unfinished.get(unit, ())):
            record = orjson.loads(line)
            if record.get("line") == 0:
                record["line"] = line_counter.line_number(record["file"], record["byte_offset"])
            yield record


def _format_record(record: dict[str, Any]) -> str:
    """Format a bad record as in ``BadRecord.__str__``."""
    position = record["row"] if "row" in record else record["byte_offset"]
    return str(BadRecord(record["file"], record.get("line", ROWS), position, record["reason"], record["opening"]))


class _LineCounter:
    """Maps ascending byte offsets in a file to line numbers.

    It is needed because records in a unit that begins within a file have no line number.
    """

    def __init__(self) -> None:
        self._path, self._offset, self._line = "", 0, 1
        self._file: BinaryIO | None = None

    def line_number(self, path: str, offset: int) -> int:
        """Look up the number of the line that begins at ``offset``; 0 if the file is no longer readable."""
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
        while self._offset < offset and (data := self._file.read(min(_READ_BYTES, offset - self._offset))):
            self._line += data.count(b"\n")
            self._offset += len(data)

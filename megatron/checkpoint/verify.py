"""Verify every byte in a checkpoint against its checksums, on all ranks.

The files are split into segments, which are distributed over the ranks. A file's checksum is computed from its
segments' checksums.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron import files
from megatron.checkpoint.file_visibility import FileVisibility
from megatron.checkpoint.metadata import (
    FileInfo,
    Manifest,
)
from megatron.checkpoint.rank_errors import gather_verdict
from megatron.errors import CheckpointError
from megatron.mpu.groups import Group

if TYPE_CHECKING:
    pass


SEGMENT_BYTES = 32 << 20


@dataclass(frozen=True)
class Segment:
    """Bytes from ``start`` to ``stop`` in a file."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class _Share:
    """One rank's results: each segment's checksum, and problems by file name."""

    crcs: dict[Segment, int]
    problems: dict[str, str]


def verify(path: Path, manifest: Manifest, world: Group) -> None:
    """Compare sizes and checksums of the files in ``path`` with the manifest. Collective.

    Raises:
        CheckpointError: names each file that is missing, truncated or altered; raised on all ranks.
    """
    all_segments = [segment for name, info in sorted(manifest.files.items()) for segment in segments(name, info.size)]
    gather_verdict(
        world,
        lambda: _read(path, manifest, all_segments[world.rank :: world.size]),
        lambda shares: _check_files(path, manifest, shares),
    )


def segments(name: str, size: int) -> list[Segment]:
    """Split a file of ``size`` bytes into segments, at least one."""
    starts = range(0, max(size, 1), SEGMENT_BYTES)
    return [Segment(name, start, min(start + SEGMENT_BYTES, size)) for start in starts]


def _read(path: Path, manifest: Manifest, local_segments: list[Segment]) -> _Share:
    names = sorted({segment.name for segment in local_segments})
    visibility = FileVisibility()
    problems = {name: _size_problem(path / name, manifest.files[name], visibility) for name in names}
    problem_by_name = {name: problem for name, problem in problems.items() if problem}
    readable = [segment for segment in local_segments if segment.name not in problem_by_name]
    with ThreadPoolExecutor(_num_threads()) as pool:
        crcs = pool.map(lambda unread: files.segment_crc(path / unread.name, unread.start, unread.stop), readable)
        return _Share(dict(zip(readable, crcs, strict=True)), problem_by_name)


def _size_problem(path: Path, info: FileInfo, visibility: FileVisibility) -> str | None:
    visibility.wait_for(path, info.size)
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if size != info.size:
        return f"{path.name} is {'truncated' if size < info.size else 'too long'}: {size} of {info.size} bytes"
    return None


def _check_files(path: Path, manifest: Manifest, shares: list[_Share]) -> None:
    """Raise a CheckpointError if a file is damaged. Called on rank 0."""
    crcs = {segment: value for share in shares for segment, value in share.crcs.items()}
    problems = {name: problem for share in shares for name, problem in share.problems.items()}
    for name, info in sorted(manifest.files.items()):
        if name not in problems:
            crc = 0
            for file_segment in segments(name, info.size):
                crc = files.crc32_combine(crc, crcs[file_segment], file_segment.stop - file_segment.start)
            if crc != info.crc32:
                problems[name] = f"{name} was altered: its checksum does not match"
    if problems:
        raise CheckpointError(f"{path} is damaged: " + ", ".join(problems[name] for name in sorted(problems)))


def _num_threads() -> int:
    """Choose the reader thread count: this rank's share of the CPU cores, at most 8, which saturate any disk."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, len(os.sched_getaffinity(0)) // local_world_size))

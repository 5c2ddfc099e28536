"""Checkpoint folder names, and the order in which to try them.

| name | meaning |
|---|---|
| ``step-00000020`` | a checkpoint; ``step-00000020-1`` is the same step, saved once more |
| ``.tmp-...`` | a save that was killed; the next save removes it |
| ``.deleted-...`` | a deletion that was killed; the next save finishes it |
| ``.latest.tmp-...``, ``.probe-...`` | a killed ``write_latest`` or ``check_writable``; the next save removes it |
| ``latest`` | a hint for people; no code relies on it |

Entries with other names do not belong to this project and are never touched.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from megatron import files, log
from megatron.checkpoint import metadata
from megatron.checkpoint.manifest import CHECKPOINTS as CHECKPOINTS
from megatron.errors import ConfigError

LATEST = "latest"
_CHECKPOINT = re.compile(r"step-\d{8,}(-\d+)?")
_STALE = (".tmp-", ".deleted-", f".{LATEST}.tmp-", ".probe-")


def checkpoints_folder(source: Path) -> Path:
    """Select the checkpoint folder inside the run folder ``source``; any other path is returned unchanged."""
    inner = source / CHECKPOINTS
    return inner if inner.is_dir() else source


def list_checkpoints(root: Path) -> list[Path]:
    """List the folders in ``root`` with a checkpoint's name, complete or not; empty if ``root`` does not exist."""
    return [path for path in root.iterdir() if _CHECKPOINT.fullmatch(path.name)] if root.is_dir() else []


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Sort the checkpoints whose manifest verifies, last saved first."""
    by_sequence = [(metadata.read_sequence(path), path) for path in paths]
    return [path for _, path in sorted(((s, p) for s, p in by_sequence if s is not None), reverse=True)]


def last_sequence(paths: Iterable[Path]) -> int:
    """Find the highest sequence number; 0 if no manifest verifies."""
    return max((metadata.read_sequence(path) or 0 for path in paths), default=0)


def order_candidates(paths: Iterable[Path]) -> list[Path]:
    """Sort all checkpoints in the order in which to try them: last saved first.

    A checkpoint whose manifest does not verify has no known sequence number. If its step or its modification times
    suggest that it is the newest, it comes first, so that an older checkpoint is not loaded without a warning.
    """
    paths = list(paths)
    verified = newest_first(paths)
    broken = sorted(set(paths) - set(verified), key=_last_modified_ns, reverse=True)
    maybe_newer = [path for path in broken if not verified or _may_be_newer(path, verified[0])]
    return [*maybe_newer, *verified, *(path for path in broken if path not in maybe_newer)]


def _may_be_newer(path: Path, other: Path) -> bool:
    return step_of(path) >= step_of(other) or _last_modified_ns(path) > _last_modified_ns(other)


def _last_modified_ns(path: Path) -> int:
    """Return the modification time of the newest file in ``path``, in ns."""
    with suppress(OSError):
        return max((child.stat().st_mtime_ns for child in path.iterdir()), default=0)
    return 0


def step_of(path: Path) -> int:
    """Parse the step in a checkpoint's name (native or DeepSpeed's format)."""
    return int(re.findall(r"\d+", path.name)[0])


def unused_path(root: Path, step: int) -> Path:
    """Choose an unused path for a new checkpoint of ``step``, so that an existing one is never overwritten."""
    path = root / f"step-{step:08d}"
    suffix = 0
    while path.exists():
        suffix += 1
        path = root / f"step-{step:08d}-{suffix}"
    return path


def temporary_path(target: Path) -> Path:
    """Return the temporary folder in which the checkpoint ``target`` is assembled, on the same file system."""
    return target.with_name(f".tmp-{target.name}-{os.getpid()}")


def commit_checkpoint(temporary: Path, target: Path) -> None:
    """Commit the checkpoint assembled in ``temporary`` by renaming it to ``target``.

    Raises:
        OSError: the rename failed.
    """
    try:
        files.rename(temporary, target)
    except OSError as error:
        if temporary.exists() or not target.exists():
            raise
        log.warning(f"{target} is complete, but the rename may not have been flushed to the disk: {error}")


def remove_stale(root: Path, prefixes: tuple[str, ...] = _STALE) -> None:
    """Delete leftovers of killed saves and deletions in ``root``. A failure is only logged as a warning."""
    for path in sorted(root.iterdir()):
        if path.name.startswith(prefixes):
            try:
                files.remove_tree(path) if path.is_dir() else files.remove_file(path)
            except OSError as error:
                log.warn_once(f"{path}, which is left over from a killed save or deletion, cannot be deleted: {error}")


def write_latest(root: Path, path: Path) -> None:
    """Write the name of ``path`` to the ``latest`` hint. A failure is only logged as a warning."""
    try:
        files.replace_bytes(root / LATEST, f"{path.name}\n".encode())
    except OSError as error:
        log.warning(f"the file {root / LATEST} could not be written ({error}); the checkpoint {path} is complete")


def read_latest(root: Path) -> str | None:
    """Read the name in the ``latest`` hint; None if there is no hint."""
    with suppress(OSError):
        return (root / LATEST).read_bytes()[:200].decode(errors="replace").strip()
    return None


def check_writable(root: Path) -> None:
    """Create ``root`` and write a probe file, so that an unwritable target fails at start-up and not at the first save.

    Raises:
        ConfigError: ``root`` cannot be created or written.
    """
    try:
        files.make_folder(root)
        descriptor, probe = tempfile.mkstemp(prefix=".probe-", dir=root)
        os.close(descriptor)
        try:
            files.write_bytes(Path(probe), b"probe")
        finally:
            with suppress(FileNotFoundError):  # another job may have removed the probe file as a leftover
                os.unlink(probe)
    except OSError as error:
        raise ConfigError(f"--save must be a writable folder, got {root}: {error}") from error

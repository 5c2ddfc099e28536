"""Names of checkpoint folders, and the newest one.

| name | is |
|---|---|
| ``step-00000020`` | a checkpoint; ``step-00000020-1`` the same step saved once more |
| ``.tmp-...`` | a save that was killed; the next save removes it |
| ``.deleted-...`` | a removal that was killed; the next save goes on with it |
| ``.latest.tmp-...``, ``.probe-...`` | likewise of the hint, and of the check at the start |
| ``latest`` | a hint for people; nothing relies on it |

Anything else belongs to somebody else and is left alone.
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


def checkpoints_in(source: Path) -> Path:
    """Return the folder of checkpoints, or the one checkpoint, that ``source`` means, which may be a run folder."""
    inner = source / CHECKPOINTS
    return inner if inner.is_dir() else source


def list_checkpoints(root: Path) -> list[Path]:
    """Return the folders in ``root`` that carry a checkpoint's name, whole or not; none where there is no ``root``."""
    return [path for path in root.iterdir() if _CHECKPOINT.fullmatch(path.name)] if root.is_dir() else []


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Return those whose manifest verifies, the last saved first."""
    found = [(metadata.read_sequence(path), path) for path in paths]
    return [path for _, path in sorted(((s, p) for s, p in found if s is not None), reverse=True)]


def last_sequence(paths: Iterable[Path]) -> int:
    """Return the highest sequence number, 0 where no manifest verifies."""
    return max((metadata.read_sequence(path) or 0 for path in paths), default=0)


def in_turn(paths: Iterable[Path]) -> list[Path]:
    """Return the order in which to try checkpoints: the last saved first.

    One without a manifest that verifies cannot say when it was saved. It comes first if it may be the last one, going
    by its step and the times of its files, so that nobody takes an older one without a word.
    """
    paths = list(paths)
    whole = newest_first(paths)
    broken = sorted(set(paths) - set(whole), key=_written_at, reverse=True)
    ahead = [path for path in broken if not whole or _may_be_newer(path, whole[0])]
    return [*ahead, *whole, *(path for path in broken if path not in ahead)]


def _may_be_newer(path: Path, other: Path) -> bool:
    return step_of(path) >= step_of(other) or _written_at(path) > _written_at(other)


def _written_at(path: Path) -> int:
    """Return when the last file in ``path`` was written, in ns."""
    with suppress(OSError):
        return max((child.stat().st_mtime_ns for child in path.iterdir()), default=0)
    return 0


def step_of(path: Path) -> int:
    """Return the step that the name of a checkpoint, in either format, says."""
    return int(re.findall(r"\d+", path.name)[0])


def free_name(root: Path, step: int) -> Path:
    """Return the path for a new checkpoint of ``step``: an existing one is never written over."""
    path = root / f"step-{step:08d}"
    number = 0
    while path.exists():
        number += 1
        path = root / f"step-{step:08d}-{number}"
    return path


def temporary_name(target: Path) -> Path:
    """Return the folder in which the checkpoint ``target`` is put together, on the same file system."""
    return target.with_name(f".tmp-{target.name}-{os.getpid()}")


def commit_checkpoint(temporary: Path, target: Path) -> None:
    """Let what was put together in ``temporary`` be the checkpoint ``target``: from the rename on it is.

    Raises:
        OSError: it was not renamed.
    """
    try:
        files.rename(temporary, target)
    except OSError as error:
        if temporary.exists() or not target.exists():
            raise
        log.warning(f"{target} is complete, but its name may not have reached the disk: {error}")


def remove_stale(root: Path, prefixes: tuple[str, ...] = _STALE) -> None:
    """Delete what killed saves and removals left in ``root``; what cannot be deleted costs a warning only."""
    for path in sorted(root.iterdir()):
        if path.name.startswith(prefixes):
            try:
                files.remove_tree(path) if path.is_dir() else files.remove_file(path)
            except OSError as error:
                log.warn_once(f"{path}, which a killed save or removal has left, cannot be deleted: {error}")


def write_latest(root: Path, path: Path) -> None:
    """Point the hint at ``path``; a failure costs nothing but the hint."""
    try:
        files.replace_bytes(root / LATEST, f"{path.name}\n".encode())
    except OSError as error:
        log.warning(f"the hint {root / LATEST} could not be written ({error}); the checkpoint {path} is complete")


def read_latest(root: Path) -> str | None:
    """Return the name in the hint, None where there is no hint."""
    with suppress(OSError):
        return (root / LATEST).read_bytes()[:200].decode(errors="replace").strip()
    return None


def check_writable(root: Path) -> None:
    """Create ``root`` and write a probe file in it, so that a bad target is found at the start, not at the first save.

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
            with suppress(FileNotFoundError):  # who holds the folder's lock takes it for a leftover
                os.unlink(probe)
    except OSError as error:
        raise ConfigError(f"--save must name a folder that can be written, got {root}: {error}") from error

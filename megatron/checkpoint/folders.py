"""The names in a folder of checkpoints, and what may be deleted there.

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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron import files, log
from megatron.checkpoint import manifest
from megatron.errors import CheckpointError, ConfigError

LATEST = "latest"
_CHECKPOINT = re.compile(r"step-\d{8,}(-\d+)?")
_LEFTOVER = (".tmp-", ".deleted-", f".{LATEST}.tmp-", ".probe-")


def newest_first(root: Path) -> list[Path]:
    """Return the folders in ``root`` that carry a checkpoint's name and a manifest's head, the last saved first."""
    found = [(manifest.peek_sequence(path), path) for path in root.iterdir() if _CHECKPOINT.fullmatch(path.name)]
    return [path for _, path in sorted(((s, p) for s, p in found if s is not None), reverse=True)]


def without_manifest(root: Path) -> list[Path]:
    """Return the folders in ``root`` that carry a checkpoint's name only."""
    named = [path for path in root.iterdir() if _CHECKPOINT.fullmatch(path.name)]
    return sorted(path for path in named if manifest.peek_sequence(path) is None)


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


def remove(path: Path) -> None:
    """Delete the checkpoint ``path``: the rename takes it away in one step, then its files go."""
    gone = path.with_name(f".deleted-{path.name}-{os.getpid()}")
    files.rename(path, gone)
    files.remove_tree(gone)


def remove_leftovers(root: Path) -> None:
    """Delete what killed saves and removals left in ``root``."""
    for path in sorted(root.iterdir()):
        if path.name.startswith(_LEFTOVER):
            files.remove_tree(path) if path.is_dir() else files.remove_file(path)


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the last so many complete ones, each whose step is a multiple, and the one loaded.

    ``last`` None: all.
    """

    last: int | None = None
    every: int | None = None
    loaded: Path | None = None

    def protects(self, path: Path) -> bool:
        """Tell whether ``path`` stays however many came after it."""
        if self.every is not None and step_of(path) % self.every == 0:
            return True
        return self.loaded is not None and self.loaded.exists() and path.samefile(self.loaded)


def step_of(path: Path) -> int:
    """Return the step that the name of a checkpoint says."""
    return int(path.name.split("-")[1])


def remove_old(root: Path, keep: Keep) -> None:
    """Delete the checkpoints in ``root`` that need not stay. A broken one does not count among the last ones."""
    if keep.last is None:
        return
    kept = 0
    for path in newest_first(root):
        if kept >= keep.last and not keep.protects(path):
            remove(path)
        elif is_complete(path):
            kept += 1


def is_complete(path: Path) -> bool:
    """Tell whether the manifest of ``path`` verifies and its files have their sizes (their bytes are not read)."""
    try:
        content = manifest.from_bytes((path / manifest.NAME).read_bytes(), path)
        return all((path / name).stat().st_size == facts.size for name, facts in content.files.items())
    except (OSError, CheckpointError):
        return False


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
            os.unlink(probe)
    except OSError as error:
        raise ConfigError(f"--save must name a folder that can be written, got {root}: {error}") from error

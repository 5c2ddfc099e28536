"""The file operations behind checkpoints, token files and run folders.

Everything that must survive a kill at any moment is written through these few functions: a test replaces
``before_operation`` and ends the process ahead of the k-th operation, for every k.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def _nothing(operation: str, path: Path) -> None:
    return None


before_operation: Callable[[str, Path], None] = _nothing
"""Called ahead of each operation with its name and path; tests plant crashes and full disks here."""


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Write ``data`` to ``path`` and flush it to the disk; the file may be half there after a kill."""
    before_operation("write", path)
    with open(path, "wb") as file:
        file.write(data)
        before_operation("fsync", path)
        file.flush()
        os.fsync(file.fileno())


def rename(source: Path, target: Path) -> None:
    """Move ``source`` to ``target`` in one step and flush the folder: the commit of a protocol."""
    before_operation("rename", target)
    os.replace(source, target)
    sync_folder(target.parent)


def replace_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path``, then rename: a reader sees the old or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        write_bytes(temporary, data)
        rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Flush the names in ``folder`` to the disk."""
    before_operation("sync_folder", folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

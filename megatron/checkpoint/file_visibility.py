"""Wait for files that another machine has written to a network file system.

A network file system may show a folder before its files, or a file before its last bytes, for as long as its caches
live. So a file that must be there is waited for, but only on a network file system: on a local disk a missing file is
missing, and is said at once.
"""

from __future__ import annotations

import time
from pathlib import Path

WAIT_S = 120.0
"""How long files on a network file system are waited for. NFS caches attributes for up to 60 s by default."""
MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "ceph",
    "gpfs",
    "beegfs",
    "glusterfs",
    "fuse",
    "9p",
    "afs",
    "orangefs",
    "pvfs",
)
_LOCAL_FUSE = ("fuseblk", "fuse.overlayfs", "fuse-overlayfs")


class FileVisibility:
    """Waits for the files of one checkpoint, for all of them together ``WAIT_S`` from the first that is missed on."""

    def __init__(self) -> None:
        self._end: float | None = None

    def wait_for(self, path: Path, size: int = 0) -> None:
        """Return once ``path`` is there with at least ``size`` bytes, or when waiting is of no use; raise nothing."""
        if _is_visible(path, size) or not is_on_network(path):
            return
        self._end = self._end or time.monotonic() + WAIT_S
        pause = 0.05
        while not _is_visible(path, size) and time.monotonic() < self._end:
            time.sleep(pause)
            pause = min(2 * pause, 2.0)


def _is_visible(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size >= size
    except OSError:
        return False


def is_on_network(path: Path) -> bool:
    """Tell by its mount whether ``path`` lies on a file system that other machines write too."""
    kind = _mounted_as(path.resolve())
    return kind.startswith(_NETWORK) and kind not in _LOCAL_FUSE


def _mounted_as(path: Path) -> str:
    """Return the type of the file system that holds ``path``, such as "ext4"; empty where the system does not say."""
    try:
        mounts = [line.split(" - ", 1) for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return ""
    kinds = {_unescaped(before.split()[4]): after.split()[0] for before, after in mounts}
    return next((kinds[str(place)] for place in (path, *path.parents) if str(place) in kinds), "")


def _unescaped(mount_point: str) -> str:
    return mount_point.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")

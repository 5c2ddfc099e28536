"""Wait for files that another machine has written to a network file system.

Because of caches, a network file system may show a folder before its files, or a file before its last bytes. Readers
therefore wait for files that must exist. On a local disk, a missing file is reported immediately.
"""

from __future__ import annotations

import time
from pathlib import Path

WAIT_S = 120.0
"""Maximum wait for files on a network file system, in seconds. NFS caches attributes for up to 60 s by default."""
MOUNTINFO = Path("/proc/self/mountinfo")
_NETWORK_FS_TYPES = (
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
_LOCAL_FUSE_TYPES = ("fuseblk", "fuse.overlayfs", "fuse-overlayfs")


class FileVisibility:
    """Waits for the files of one checkpoint. The total wait ends ``WAIT_S`` after the first missing file."""

    def __init__(self) -> None:
        self._deadline: float | None = None

    def wait_for(self, path: Path, size: int = 0) -> None:
        """Wait until ``path`` has at least ``size`` bytes; never raises.

        Returns after ``WAIT_S`` at the latest, and at once on a local disk.
        """
        if _is_visible(path, size) or not is_on_network(path):
            return
        self._deadline = self._deadline or time.monotonic() + WAIT_S
        delay_s = 0.05
        while not _is_visible(path, size) and time.monotonic() < self._deadline:
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, 2.0)


def _is_visible(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size >= size
    except OSError:
        return False


def is_on_network(path: Path) -> bool:
    """Check if ``path`` is on a network file system, which other machines may write to."""
    fs_type = _file_system_type(path.resolve())
    return fs_type.startswith(_NETWORK_FS_TYPES) and fs_type not in _LOCAL_FUSE_TYPES


def _file_system_type(path: Path) -> str:
    """Look up the file system type, such as "ext4"; empty if the system does not report it."""
    try:
        mounts = [line.split(" - ", 1) for line in MOUNTINFO.read_text().splitlines()]
    except OSError:
        return ""
    fs_types = {_unescape(before.split()[4]): after.split()[0] for before, after in mounts}
    return next((fs_types[str(folder)] for folder in (path, *path.parents) if str(folder) in fs_types), "")


def _unescape(mount_point: str) -> str:
    return mount_point.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")

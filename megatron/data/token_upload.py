"""Token files into an object store: made on the disk, uploaded, looked through there, the index last.

Whoever finds ``PREFIX.idx`` in the store finds the other files whole: an earlier one is deleted before anything else is
sent, and the new one comes when all else is there with its size and checksum.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from megatron import files, log, object_store
from megatron.data import dataset_metadata
from megatron.errors import DataError

ORDER = (".bin", ".meta.json", ".idx")
"""Uploaded so; ``.meta.json`` is not there for files whose vocabulary nobody knows."""


def local_prefix(target: str, work_dir: Path) -> str:
    """Return where the token files ``target`` of a store are made: a name for this target alone in ``work_dir``."""
    name = target.rstrip("/").rpartition("/")[2]
    return str(work_dir / f"{name}-{hashlib.sha256(target.encode()).hexdigest()[:8]}")


def check_target(target: str) -> None:
    """Check that the store takes files at ``target``, before hours are spent: a small one is put there, and deleted.

    Raises:
        DataError: it does not.
    """
    try:
        object_store.check_writable(target)
    except DataError as error:
        raise DataError(f"--output-prefix must name a place of a store that can be written to: {error}") from error


def upload(prefix: str, target: str) -> None:
    """Put the token files ``prefix`` of this machine into a store as ``target``, and delete them here.

    Raises:
        DataError: the store does not take them; they stay here, and no ``target.idx`` is there.
    """
    paths = {suffix: Path(prefix + suffix) for suffix in ORDER if Path(prefix + suffix).exists()}
    try:
        for suffix in reversed(ORDER):
            object_store.remove(target + suffix)
        sidecar = dataset_metadata.read(Path(prefix + ".meta.json"))
        known = {".bin": sidecar.bin_crc32, ".idx": sidecar.idx_crc32} if sidecar else {}
        for suffix, path in paths.items():
            crc32 = known[suffix] if suffix in known else files.size_and_crc(path)[1]
            object_store.upload(path, target + suffix, crc32=crc32)
            log.info(f"uploaded {target}{suffix}: {path.stat().st_size / 1e6:.1f} MB, read back, checksum {crc32:08x}")
    except DataError as error:
        with suppress(DataError):
            object_store.remove(target + ".idx")
        raise DataError(
            f"{str(error).rstrip('.')}. The token files are whole in {prefix}.*; nothing in the store counts as whole."
        ) from error
    for path in reversed(paths.values()):
        with suppress(OSError):
            files.remove_file(path)

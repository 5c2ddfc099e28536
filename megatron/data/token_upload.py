"""Upload token files to an object store. They are built on the local disk; the index is uploaded last.

If ``PREFIX.idx`` is in the store, the other files are complete: an earlier index is deleted first, and the new index is
uploaded after the other files' sizes and checksums have been verified.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from megatron import files, log, object_store
from megatron.data import dataset_metadata
from megatron.errors import DataError

ORDER = (".bin", ".meta.json", ".idx")
"""Upload order; there is no ``.meta.json`` for files whose vocabulary is unknown."""


def local_prefix(target: str, work_dir: Path) -> str:
    """Choose a prefix in ``work_dir``, unique to ``target``, under which the token files are built."""
    name = target.rstrip("/").rpartition("/")[2]
    return str(work_dir / f"{name}-{hashlib.sha256(target.encode()).hexdigest()[:8]}")


def check_target(target: str) -> None:
    """Check that ``target`` is writable before a long job, by uploading and deleting a small file.

    Raises:
        DataError: the target is not writable.
    """
    try:
        object_store.check_writable(target)
    except DataError as error:
        raise DataError(f"--output-prefix must name a writable location in an object store: {error}") from error


def upload(prefix: str, target: str) -> None:
    """Upload the local token files ``prefix`` to ``target`` and delete the local files.

    Raises:
        DataError: the upload failed; the local files are not deleted, and ``target.idx`` does not exist.
    """
    paths = {suffix: Path(prefix + suffix) for suffix in ORDER if Path(prefix + suffix).exists()}
    try:
        for suffix in reversed(ORDER):
            object_store.remove(target + suffix)
        sidecar = dataset_metadata.read(Path(prefix + ".meta.json"))
        checksums = {".bin": sidecar.bin_crc32, ".idx": sidecar.idx_crc32} if sidecar else {}
        for suffix, path in paths.items():
            crc32 = checksums[suffix] if suffix in checksums else files.size_and_crc(path)[1]
            object_store.upload(path, target + suffix, crc32=crc32)
            log.info(f"uploaded {target}{suffix}: {path.stat().st_size / 1e6:.1f} MB, verified, checksum {crc32:08x}")
    except DataError as error:
        with suppress(DataError):
            object_store.remove(target + ".idx")
        raise DataError(
            f"{str(error).rstrip('.')}. The local token files {prefix}.* are complete; the files in the store are not."
        ) from error
    for path in reversed(paths.values()):
        with suppress(OSError):
            files.remove_file(path)

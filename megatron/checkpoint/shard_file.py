"""One rank's tensors in one safetensors file; files that are late on network file systems."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron import files
from megatron.checkpoint.metadata import DTYPE_NAMES
from megatron.errors import CheckpointError

# Files that are there for the machine that wrote them and not yet for this one.
#
# A network file system may show a folder before its files, or a file before its last bytes, for as long as its caches
# live. So a file that must be there is waited for, but only on a network file system: on a local disk a missing file is
# missing, and is said at once.

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


# One rank's tensors in one safetensors file, written as a stream: one tensor at a time leaves the device.
#
# The format: 8 bytes, little-endian length of the header; the header, JSON padded with spaces to a multiple of 8;
# then the tensors' bytes without gaps. A reader that knows safetensors reads the file; it cannot carry code.
#
# Source: https://github.com/huggingface/safetensors, "Format".

CHUNK_BYTES = 1 << 22  # a chunk stays in the cache between its checksum and its write


def shard_file_name(rank: int) -> str:
    """Return the name of the file that rank ``rank`` writes."""
    return f"rank-{rank:05d}.safetensors"


def key_of(name: str, start: int) -> str:
    """Return the key of the part of the tensor ``name`` that begins at ``start`` of the dimension that is cut."""
    return f"{name}[{start}:]" if start else name


def header(tensors: dict[str, torch.Tensor]) -> bytes:
    """Return the first bytes of the file that holds ``tensors`` in this order."""
    fields: dict[str, Any] = {}
    offset = 0
    for key, tensor in tensors.items():
        stop = offset + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        fields[key] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard_file(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Write ``tensors`` to ``path``, flush, and return (bytes, crc32)."""
    return files.write_chunks(path, _chunks(tensors))


def _chunks(tensors: dict[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    yield header(tensors)
    for tensor in tensors.values():
        on_host = tensor.detach().cpu().contiguous().flatten()
        content = on_host.view(torch.uint8).numpy().data
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]


class ShardFile:
    """An open safetensors file; slices come from the memory map, so only what is asked for is read."""

    def __init__(self, path: Path, patience: FileVisibility | None = None) -> None:
        self._path = path
        (patience or FileVisibility()).wait_for(path)
        try:
            self._file = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error

    def read(self, key: str, cuts: tuple[slice, ...]) -> torch.Tensor:
        """Return ``tensor[cuts]`` of the tensor ``key``; no cuts: the tensor of no dimensions."""
        try:
            return self._file.get_slice(key)[cuts] if cuts else self._file.get_tensor(key)
        except SafetensorError as error:
            raise CheckpointError(f"{self._path}: {key} cannot be read: {error}") from error

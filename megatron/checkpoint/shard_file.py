"""ShardFile: one rank's tensors in one safetensors file.

File format: 8 bytes with the header length (little-endian), the header (JSON padded with spaces to a multiple of
8 bytes), and the tensor bytes without gaps. Any safetensors reader can read the file. Reading the file never
executes code.

Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron import files
from megatron.checkpoint.file_visibility import FileVisibility
from megatron.checkpoint.tensor_record import DTYPE_NAMES
from megatron.errors import CheckpointError

CHUNK_BYTES = 1 << 22  # small enough to stay in the CPU cache between its checksum and its write


def shard_file_name(rank: int) -> str:
    """Return the name of the file that rank ``rank`` writes."""
    return f"rank-{rank:05d}.safetensors"


def shard_key(name: str, start: int) -> str:
    """Build the key of the shard of tensor ``name`` that starts at index ``start`` along the partitioned dimension."""
    return f"{name}[{start}:]" if start else name


def make_header(tensors: dict[str, torch.Tensor]) -> bytes:
    """Build the header for ``tensors`` in this order, including the 8 length bytes."""
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
    """Write ``tensors`` to ``path``, flush, and return (size in bytes, crc32)."""
    return files.write_chunks(path, _chunks(tensors))


def _chunks(tensors: dict[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    yield make_header(tensors)
    for tensor in tensors.values():
        host_tensor = tensor.detach().cpu().contiguous().flatten()
        content = host_tensor.view(torch.uint8).numpy().data
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]


class ShardFile:
    """An open safetensors file. It is memory-mapped, so that only the requested slices are read."""

    def __init__(self, path: Path, visibility: FileVisibility | None = None) -> None:
        self._path = path
        (visibility or FileVisibility()).wait_for(path)
        try:
            self._file = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error

    def read(self, key: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """Read ``tensor[slices]`` from the tensor ``key``; the full tensor (a scalar) if ``slices`` is empty."""
        try:
            return self._file.get_slice(key)[slices] if slices else self._file.get_tensor(key)
        except SafetensorError as error:
            raise CheckpointError(f"{self._path}: {key} cannot be read: {error}") from error

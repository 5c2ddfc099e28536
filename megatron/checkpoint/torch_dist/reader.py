"""Read slices of tensors in a ``torch_dist`` folder."""

from __future__ import annotations

import math
import mmap
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.tensor_record import DTYPES
from megatron.checkpoint.torch_dist.index import Chunk, ChunkedTensor, TorchDistIndex
from megatron.checkpoint.torch_dist.names import Place
from megatron.checkpoint.torch_dist.torch_zip import ITEM_SIZES, ArchivedTensor, read_archive
from megatron.errors import CheckpointError

Bounds = Sequence[tuple[int, int]]
"""The (start, stop) of a part along every dimension."""


class TorchDistReader:
    """Reads tensor slices. Only the necessary rows are copied; each chunk's checksum is verified once."""

    def __init__(self, path: Path, index: TorchDistIndex) -> None:
        self._path, self._index = path, index
        self._files: dict[str, memoryview] = {}
        self._archived: dict[tuple[str, int], ArchivedTensor] = {}
        self._chunks_by_layer: dict[str, dict[int, list[Chunk]]] = {}

    def read(self, name: str, bounds: Bounds) -> torch.Tensor:
        """Read the slice ``bounds`` of the tensor ``name``.

        Raises:
            CheckpointError: the dtype is not supported, or a chunk is damaged.
        """
        tensor = self._index.tensors[name]
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{self._path}: {name} has the dtype {tensor.dtype}, which is not supported")
        result = torch.empty([stop - start for start, stop in bounds], dtype=DTYPES[tensor.dtype])
        for chunk in self._overlapping(name, tensor, bounds):
            overlap = [
                (max(start, offset), min(stop, offset + size))
                for (start, stop), offset, size in zip(bounds, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(start < stop for start, stop in overlap):
                target = result[
                    tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(overlap, bounds, strict=True))
                ]
                source = [(a - offset, b - offset) for (a, b), offset in zip(overlap, chunk.offsets, strict=True)]
                target.copy_(self._read_chunk(name, tensor.dtype, chunk, source))
        return result

    def _overlapping(self, name: str, tensor: ChunkedTensor, bounds: Bounds) -> Sequence[Chunk]:
        """Return all chunks, or for stacked layers the chunks of the layers in ``bounds``."""
        if not tensor.shape or any(chunk.sizes[0] != 1 for chunk in tensor.chunks):
            return tensor.chunks
        if name not in self._chunks_by_layer:
            by_layer: dict[int, list[Chunk]] = {}
            for chunk in tensor.chunks:
                by_layer.setdefault(chunk.offsets[0], []).append(chunk)
            self._chunks_by_layer[name] = by_layer
        return [chunk for idx in range(*bounds[0]) for chunk in self._chunks_by_layer[name].get(idx, [])]

    def _read_chunk(self, name: str, dtype: str, chunk: Chunk, bounds: Bounds) -> torch.Tensor:
        """Read a slice of ``chunk``; ``bounds`` are relative to the start of the chunk."""
        view = self._view(chunk)
        try:
            archived = self._open(dtype, chunk, view)
            if not archived.is_contiguous:
                elements = _elements(view, archived, 0, (archived.stop - archived.start) // ITEM_SIZES[dtype])
                full = elements.as_strided(archived.shape, archived.stride, archived.offset).reshape(chunk.sizes)
                return full[tuple(slice(*bound) for bound in bounds)]
            num_leading = next((dim for dim, size in enumerate(chunk.sizes) if size != 1), max(len(chunk.sizes) - 1, 0))
            row_shape = chunk.sizes[num_leading + 1 :]
            row_size = math.prod(row_shape)
            first, last = bounds[num_leading] if bounds else (0, 1)
            rows = _elements(view, archived, archived.offset + first * row_size, (last - first) * row_size)
            rows = rows.view(*chunk.sizes[:num_leading], last - first, *row_shape) if bounds else rows.view(())
            inner = [slice(None)] * (num_leading + 1) + [slice(*bound) for bound in bounds[num_leading + 1 :]]
            return rows[tuple(inner)] if bounds else rows
        except ValueError as error:
            raise CheckpointError(
                f"{self._path / chunk.span.file}: {name} at {list(chunk.offsets)} is damaged: {error}"
            ) from error

    def _open(self, dtype: str, chunk: Chunk, view: memoryview) -> ArchivedTensor:
        """Open the archived tensor in ``chunk``; its checksum is verified at the first call.

        Raises:
            ValueError: the chunk is damaged.
        """
        key = (chunk.span.file, chunk.span.start)
        if key not in self._archived:
            archived = read_archive(view)
            if not isinstance(archived, ArchivedTensor):
                raise ValueError("it is not a tensor")
            if archived.dtype != dtype or math.prod(archived.shape) != math.prod(chunk.sizes):
                expected = f"{dtype} {list(chunk.sizes)}"
                raise ValueError(f"it has {archived.dtype} {list(archived.shape)}, expected {expected}")
            if zlib.crc32(view[archived.start : archived.stop]) != archived.crc32:
                raise ValueError("its checksum does not match")
            self._archived[key] = archived
        return self._archived[key]

    def _view(self, chunk: Chunk) -> memoryview:
        """Map the bytes of ``chunk`` in its file, which are read from the disk when they are used."""
        name = chunk.span.file
        if name not in self._files:
            try:
                with open(self._path / name, "rb") as file:
                    self._files[name] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{self._path / name} cannot be read: {error}") from error
        return self._files[name][chunk.span.start : chunk.span.start + chunk.span.num_bytes]


def _elements(view: memoryview, archived: ArchivedTensor, first: int, count: int) -> torch.Tensor:
    """Copy ``count`` elements from a storage, from element ``first`` on."""
    size = ITEM_SIZES[archived.dtype]
    start, stop = archived.start + first * size, archived.start + (first + count) * size
    if stop > archived.stop:
        raise ValueError("its storage is too short")
    if not count:
        return torch.empty(0, dtype=DTYPES[archived.dtype])
    return torch.frombuffer(bytearray(view[start:stop]), dtype=DTYPES[archived.dtype])


class PlaceSlice:
    """The tensor at a ``Place``; indexing reads only the requested elements.

    Args:
        name: the full tensor's name, with an optimizer state's prefix.
    """

    def __init__(self, reader: TorchDistReader, name: str, element: tuple[int, ...], tensor: ChunkedTensor) -> None:
        self._reader, self._name, self._element, self._shape = reader, name, element, tensor.shape

    @property
    def shape(self) -> list[int]:
        """Shape of the tensor at the place."""
        return list(self._shape[len(self._element) :])

    def __getitem__(self, index: Any) -> torch.Tensor:
        index = index if isinstance(index, tuple) else (index,)
        slices = [*index, *[slice(None)] * (len(self.shape) - len(index))]
        bounds = [(i, i + 1) for i in self._element]
        bounds += [part.indices(size)[:2] for part, size in zip(slices, self.shape, strict=True)]
        values = self._reader.read(self._name, bounds)
        return values.view(values.shape[len(self._element) :])


def place_shape(place: Place, tensor: ChunkedTensor) -> tuple[int, ...]:
    """Return the tensor shape at ``place``."""
    return tensor.shape[len(place.element) :]

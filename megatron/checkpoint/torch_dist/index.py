"""Tensors in a ``torch_dist`` folder: the file ``.metadata``, checked against the folder's files. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.torch_dist.inert_pickle import InertObject, path_of, read_inertly
from megatron.errors import CheckpointError

METADATA = ".metadata"

# ``.metadata`` is a pickled ``Metadata`` of torch.distributed.checkpoint:
#
# | attribute | content |
# |---|---|
# | state_dict_metadata | name -> size, dtype and chunks of a tensor; or a mark for a byte entry |
# | storage_data | (name, offset of a chunk) -> file, first byte, number of bytes |
#
# Each chunk, and each byte entry, is a ``torch.save`` archive within a file.

_DTYPES = {
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16",
    "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8", "torch.uint8": "U8",
    "torch.bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Span:
    """A range in a file: ``num_bytes`` bytes from ``start`` on."""

    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Chunk:
    """A chunk of a tensor, and its place in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: Span


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor that consists of chunks, which cover it exactly once.

    Args:
        dtype: safetensors' name; torch's name for a dtype that is not supported.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class TorchDistIndex:
    """All entries in a folder: tensors and byte entries, by name."""

    tensors: Mapping[str, ChunkedTensor]
    objects: Mapping[str, Span]


def read_index(folder: Path) -> TorchDistIndex:
    """Read the entries in ``folder``.

    Raises:
        CheckpointError: ``.metadata`` is missing or damaged, a file is missing or truncated, or a tensor is incomplete.
    """
    path = folder / METADATA
    try:
        metadata = read_inertly(path.read_bytes())
        entries, locations = metadata.state["state_dict_metadata"], metadata.state["storage_data"]
        spans = _spans_by_chunk(locations)
        tensors, objects = {}, {}
        for name, entry in entries.items():
            if path_of(entry).endswith(".BytesStorageMetadata"):
                objects[name] = spans[name, None]
            else:
                tensors[name] = _tensor(name, entry.state, spans)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. {_INCOMPLETE}") from error
    except KeyError as error:
        raise CheckpointError(f"{path} does not describe a complete checkpoint: it lacks {error}") from error
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    chunk_spans = (chunk.span for tensor in tensors.values() for chunk in tensor.chunks)
    _check_files(folder, [*chunk_spans, *objects.values()])
    _check_complete(path, tensors)
    return TorchDistIndex(tensors, objects)


_INCOMPLETE = "A save that was interrupted lacks this file: choose another iteration"


def _spans_by_chunk(locations: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], Span]:
    """Map (name, chunk offset; None for bytes) to the place in a file."""
    spans = {}
    for index, location in locations.items():
        offsets, place = index.state.get("offset"), location.state
        if place.get("transform_descriptors"):
            raise ValueError(f"{index.state['fqn']} is compressed or encrypted, which is not supported")
        span = Span(str(place["relative_path"]), int(place["offset"]), int(place["length"]))
        spans[index.state["fqn"], None if offsets is None else tuple(offsets)] = span
    return spans


def _tensor(name: str, entry: Mapping[str, Any], spans: Mapping[tuple[str, Any], Span]) -> ChunkedTensor:
    properties = entry["properties"].state
    dtype = path_of(properties[0] if isinstance(properties, tuple) else properties["dtype"])
    chunks = []
    for chunk in entry["chunks"]:
        offsets, sizes = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
        chunks.append(Chunk(offsets, sizes, spans[name, offsets]))
    return ChunkedTensor(_DTYPES.get(dtype, dtype), tuple(entry["size"]), tuple(chunks))


def _check_files(folder: Path, spans: list[Span]) -> None:
    """Check that each file exists and is at least as long as its last span.

    Raises:
        CheckpointError: lists the files that are missing or too short.
    """
    lengths: dict[str, int] = {}
    for span in spans:
        lengths[span.file] = max(lengths.get(span.file, 0), span.start + span.num_bytes)
    problems = []
    for name, length in sorted(lengths.items()):
        if Path(name).name != name:
            raise CheckpointError(f"{folder / METADATA} names files outside of its folder: {name}")
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            problems.append(f"{name} is missing")
        elif size < length:
            problems.append(f"{name} has {size} bytes instead of {length}")
    if problems:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {'; '.join(problems)}")


def _check_complete(path: Path, tensors: Mapping[str, ChunkedTensor]) -> None:
    """Check that each tensor's chunks have all of its elements.

    Raises:
        CheckpointError: lists the tensors that have too few or too many elements.
    """
    problems = []
    for name, tensor in tensors.items():
        num_stored = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if num_stored != math.prod(tensor.shape) or _has_overlap(tensor.chunks):
            problems.append(f"{name} has {math.prod(tensor.shape)} elements, its chunks {num_stored}")
    if problems:
        raise CheckpointError(f"{path} does not describe complete tensors: {'; '.join(problems[:5])}")


def _has_overlap(chunks: tuple[Chunk, ...]) -> bool:
    """Check if two chunks begin at the same offset."""
    offsets = [chunk.offsets for chunk in chunks]
    return len(set(offsets)) != len(offsets)


def read_span(folder: Path, span: Span) -> bytes:
    """Read an entry's bytes.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with open(folder / span.file, "rb") as file:
            file.seek(span.start)
            return file.read(span.num_bytes)
    except OSError as error:
        raise CheckpointError(f"{folder / span.file} cannot be read: {error.strerror}") from error


def attributes(value: Any) -> dict[str, Any]:
    """Read the attributes of a Namespace in a pickle, or the items of a dictionary.

    Raises:
        ValueError: ``value`` is neither.
    """
    if isinstance(value, InertObject):
        value = value.state
    if not isinstance(value, dict):
        raise ValueError(f"the arguments must be a Namespace, got {type(value).__name__}")
    return value

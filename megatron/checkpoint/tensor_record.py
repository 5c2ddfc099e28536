"""TensorRecord: a local tensor and its position in its global tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.checkpoint.manifest import is_whole as is_whole
from megatron.checkpoint.manifest import read_sequence as read_sequence
from megatron.errors import CheckpointError
from megatron.mpu.shard import Shard

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The names that safetensors gives to the element types that a checkpoint may hold."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorRecord:
    """One named global tensor as this rank holds it.

    Args:
        name: layout-free name, such as ``layers.3.mlp.up.weight``.
        tensor: the local part, padding rows included.
        shard: where the local part lies in the global tensor.
        is_owner: this rank writes its part. Of the ranks that hold the same part exactly one says so.
    """

    name: str
    tensor: torch.Tensor
    shard: Shard
    is_owner: bool = True


@dataclass(frozen=True)
class Claim:
    """What one rank tells the others about a record: everything but the values."""

    name: str
    dtype: str
    shard: Shard
    is_owner: bool

    def packed(self) -> tuple[Any, ...]:
        """Return it as plain values, which are quick to pickle."""
        shard = self.shard
        cut = shard.global_shape, shard.partition_dim, shard.start, shard.length
        return self.name, self.dtype, cut, self.is_owner

    @classmethod
    def unpacked(cls, name: str, dtype: str, cut: tuple[Any, ...], is_owner: bool) -> Claim:
        """Return the claim that was packed so."""
        return cls(name, dtype, Shard(*cut), is_owner)


def claim(record: TensorRecord) -> Claim:
    """Return the claim of ``record``.

    Raises:
        CheckpointError: the local tensor does not have the shape that its shard says, or a type that no file can hold.
    """
    dtype = DTYPE_NAMES.get(record.tensor.dtype)
    if dtype is None:
        raise CheckpointError(f"{record.name}: a checkpoint holds {', '.join(DTYPES)}; got {record.tensor.dtype}")
    found, said = list(record.tensor.shape), list(part_shape(record.shard))
    dim = record.shard.partition_dim
    if dim is not None and len(found) == len(said) and found[dim] > said[dim]:
        found[dim] = said[dim]  # the rest is padding
    if found != said:
        raise CheckpointError(
            f"{record.name}: its shard {record.shard} has the shape {said}, the tensor has {list(record.tensor.shape)}"
        )
    return Claim(record.name, dtype, record.shard, record.is_owner)


def owned(records: list[TensorRecord]) -> dict[int, TensorRecord]:
    """Return what this rank writes, by its place in ``records``: without padding, the widest types first.

    In this order all tensors of a file lie aligned, as safetensors asks.
    """
    mine = {
        place: replace(record, tensor=record.shard.unpadded(record.tensor.detach()))
        for place, record in enumerate(records)
        if record.is_owner and not is_empty(record.shard)
    }
    return dict(sorted(mine.items(), key=lambda item: -item[1].tensor.element_size()))


def spans(shard: Shard) -> list[tuple[int, int]]:
    """Return the (start, stop) of ``shard`` along every dimension of the global tensor."""
    whole = [(0, size) for size in shard.global_shape]
    if shard.partition_dim is not None:
        whole[shard.partition_dim] = (shard.start, shard.start + shard.length)
    return whole


def offsets(shard: Shard) -> tuple[int, ...]:
    """Return where ``shard`` begins along every dimension of the global tensor."""
    return tuple(start for start, _ in spans(shard))


def part_shape(shard: Shard) -> tuple[int, ...]:
    """Return the shape of ``shard``, without padding."""
    return tuple(stop - start for start, stop in spans(shard))


def is_empty(shard: Shard) -> bool:
    """Tell whether ``shard`` holds nothing but padding."""
    return shard.partition_dim is not None and shard.length == 0


def tiling_problem(global_shape: tuple[int, ...], shards: list[Shard]) -> str | None:
    """Return why ``shards`` do not cover the tensor of ``global_shape`` exactly once, or None when they do."""
    filled = [shard for shard in shards if not is_empty(shard)]
    if not filled:
        return None if 0 in global_shape else "no rank writes it"
    if len(filled) == 1 and not filled[0].is_partitioned:
        return None
    dims = {shard.partition_dim for shard in filled}
    if len(dims) > 1 or None in dims:
        return f"{len(filled)} ranks write it, cut along different dimensions or whole: {dims}"
    dim = filled[0].partition_dim
    size = global_shape[dim]  # type: ignore[index]
    end = 0
    for shard in sorted(filled, key=lambda shard: shard.start):
        if shard.start != end:
            fault = "twice" if shard.start < end else "by nobody"
            return f"indices {min(end, shard.start)} to {max(end, shard.start)} of dimension {dim} are written {fault}"
        end = shard.start + shard.length
    return None if end == size else f"dimension {dim} has {size} indices, {end} are written"

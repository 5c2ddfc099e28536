"""TensorRecord: a local tensor and its position in its global tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.checkpoint.manifest import has_valid_checksum as has_valid_checksum
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
"""safetensors' names of the dtypes that a checkpoint supports."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorRecord:
    """This rank's shard of one named global tensor.

    Args:
        name: name that does not depend on the layout, such as ``layers.3.mlp.up.weight``.
        tensor: the local shard, including padding rows.
        shard: the shard's position in the global tensor.
        is_owner: this rank writes its shard. Exactly one of the ranks with the same shard is its owner.
    """

    name: str
    tensor: torch.Tensor
    shard: Shard
    is_owner: bool = True


@dataclass(frozen=True)
class Claim:
    """A record's description, without its values, that is sent to other ranks."""

    name: str
    dtype: str
    shard: Shard
    is_owner: bool

    def packed(self) -> tuple[Any, ...]:
        """Convert the claim to a tuple of plain values, which pickle quickly."""
        shard = self.shard
        shard_fields = shard.global_shape, shard.partition_dim, shard.start, shard.length
        return self.name, self.dtype, shard_fields, self.is_owner

    @classmethod
    def unpacked(cls, name: str, dtype: str, shard_fields: tuple[Any, ...], is_owner: bool) -> Claim:
        """Restore a claim from the values in ``packed``."""
        return cls(name, dtype, Shard(*shard_fields), is_owner)


def make_claim(record: TensorRecord) -> Claim:
    """Describe ``record``.

    Raises:
        CheckpointError: the local tensor's shape does not match its shard, or its dtype is not supported.
    """
    dtype = DTYPE_NAMES.get(record.tensor.dtype)
    if dtype is None:
        raise CheckpointError(f"{record.name}: the dtype must be one of {', '.join(DTYPES)}, got {record.tensor.dtype}")
    actual, shape = list(record.tensor.shape), list(shard_shape(record.shard))
    dim = record.shard.partition_dim
    if dim is not None and len(actual) == len(shape) and actual[dim] > shape[dim]:
        actual[dim] = shape[dim]  # rows beyond the shard are padding
    if actual != shape:
        raise CheckpointError(
            f"{record.name}: its shard {record.shard} has the shape {shape}, the tensor {list(record.tensor.shape)}"
        )
    return Claim(record.name, dtype, record.shard, record.is_owner)


def select_owned(records: list[TensorRecord]) -> dict[int, TensorRecord]:
    """Select the records that this rank writes, without padding: index in ``records`` -> record.

    They are sorted by element size, largest first, so that all tensors in a file are aligned, as safetensors requires.
    """
    owned_records = {
        idx: replace(record, tensor=record.shard.unpadded(record.tensor.detach()))
        for idx, record in enumerate(records)
        if record.is_owner and not is_empty(record.shard)
    }
    return dict(sorted(owned_records.items(), key=lambda item: -item[1].tensor.element_size()))


def shard_bounds(shard: Shard) -> list[tuple[int, int]]:
    """Compute (start, stop) of ``shard`` along every dimension of the global tensor."""
    bounds = [(0, size) for size in shard.global_shape]
    if shard.partition_dim is not None:
        bounds[shard.partition_dim] = (shard.start, shard.start + shard.length)
    return bounds


def offsets(shard: Shard) -> tuple[int, ...]:
    """Compute the start of ``shard`` along every dimension of the global tensor."""
    return tuple(start for start, _ in shard_bounds(shard))


def shard_shape(shard: Shard) -> tuple[int, ...]:
    """Compute the shape of ``shard``, without padding."""
    return tuple(stop - start for start, stop in shard_bounds(shard))


def is_empty(shard: Shard) -> bool:
    """Check if ``shard`` is only padding."""
    return shard.partition_dim is not None and shard.length == 0


def tiling_problem(global_shape: tuple[int, ...], shards: list[Shard]) -> str | None:
    """Explain why ``shards`` do not cover a tensor of ``global_shape`` exactly once; None if they do."""
    nonempty = [shard for shard in shards if not is_empty(shard)]
    if not nonempty:
        return None if 0 in global_shape else "no rank writes it"
    if len(nonempty) == 1 and not nonempty[0].is_partitioned:
        return None
    dims = {shard.partition_dim for shard in nonempty}
    if len(dims) > 1 or None in dims:
        return f"{len(nonempty)} ranks write it, split along different dimensions or not split: {dims}"
    dim = nonempty[0].partition_dim
    size = global_shape[dim]  # type: ignore[index]
    end = 0
    for shard in sorted(nonempty, key=lambda shard: shard.start):
        if shard.start != end:
            fault = "twice" if shard.start < end else "by no rank"
            return f"indices {min(end, shard.start)} to {max(end, shard.start)} of dimension {dim} are written {fault}"
        end = shard.start + shard.length
    return None if end == size else f"dimension {dim} has {size} indices, but {end} are written"

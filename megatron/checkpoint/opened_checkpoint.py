"""A verified checkpoint opened for reading: step, metadata, and tensor slices."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron.checkpoint.metadata import Manifest, TensorEntry
from megatron.checkpoint.tensor_record import DTYPES, TensorRecord, shard_bounds, shard_shape
from megatron.errors import CheckpointError
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import Shard

if TYPE_CHECKING:
    from megatron.checkpoint.dcp_load import ShardReader


class Checkpoint:
    """A verified checkpoint: ``step``, ``sequence``, ``metadata`` and named global tensors; any shard can be read.

    The checkpoint's folder is never written to.
    """

    def __init__(self, path: Path, manifest: Manifest, world: Group = SINGLE) -> None:
        self.path = path
        self.step = manifest.step
        self.sequence = manifest.sequence
        self.metadata: dict[str, Any] = manifest.metadata
        self._manifest, self._index, self._world = manifest, manifest.index, world
        self._reader: ShardReader | None = None

    @property
    def manifest(self) -> Manifest:
        """Files in the checkpoint, and the tensor index."""
        return self._manifest

    def names(self) -> list[str]:
        """List the global tensors by name."""
        return list(self._index)

    def shape(self, name: str) -> tuple[int, ...]:
        """Look up the global shape of ``name``."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Look up the dtype in which ``name`` was saved."""
        return DTYPES[self._entry(name).dtype]

    def read(self, name: str, shard: Shard, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read the slice ``shard`` of the tensor ``name``, without padding, on the CPU. Not collective.

        The shard need not match the shards that were saved; only the requested bytes are read.

        Args:
            dtype: convert to this type; None keeps the saved one.
        """
        self.check([(name, shard)])
        result = torch.empty(shard_shape(shard), dtype=dtype or self.dtype(name))
        self._load([TensorRecord(name, result, shard)], SINGLE)
        return result

    def load(self, records: Iterable[TensorRecord]) -> None:
        """Copy the saved values into every record's tensor, converted to its dtype; padding rows are left unchanged.

        Collective over the ranks that opened the checkpoint.

        Raises:
            CheckpointError: as ``check``, on all ranks before anything is copied.
        """
        self._load(list(records), self._world)

    def check(self, requested: Iterable[tuple[str, Shard]]) -> None:
        """Check that the checkpoint has every requested tensor with its global shape.

        Raises:
            CheckpointError: lists every missing name and every shape that differs.
        """
        problems = []
        for name, shard in requested:
            entry = self._index.get(name)
            if entry is None:
                problems.append(f"{name}: not in the checkpoint")
            elif entry.shape != tuple(shard.global_shape):
                problems.append(f"{name}: saved {list(entry.shape)}, now {list(shard.global_shape)}")
            elif any(
                not 0 <= start <= stop <= size
                for (start, stop), size in zip(shard_bounds(shard), entry.shape, strict=True)
            ):
                problems.append(f"{name}: {shard} exceeds the bounds of the tensor")
        if problems:
            raise CheckpointError(
                f"{self.path} does not fit this model ({len(problems)} tensors): " + "; ".join(problems)
            )

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._index:
            raise CheckpointError(f"{name}: not in the checkpoint {self.path}")
        return self._index[name]

    def _load(self, records: list[TensorRecord], world: Group) -> None:
        from megatron.checkpoint import (
            dcp,  # importing it takes 0.6 s; deferred to the first read
            dcp_load,
        )

        if self._reader is None:
            self._reader = dcp_load.ShardReader(self.path, self._manifest)
        dcp.load(self._reader, dcp_load.RecordLoadPlanner(records, self.check), world)

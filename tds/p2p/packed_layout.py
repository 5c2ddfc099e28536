"""PackedLayout: packs all tensors at a boundary, whatever their dtypes, into one message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tds.p2p.tensor_meta import TensorMeta

# Each tensor starts at the next multiple of 64 bytes. A partitioned tensor is sent as this rank's flat shard:
# ``ceil(numel / t)`` elements, the last shard padded with zeros. A message has at least one byte.

ALIGNMENT = 64


@dataclass(frozen=True)
class TensorGroup:
    """The tensor (slice) group over which partitioned tensors are sharded."""

    rank: int = 0
    size: int = 1
    group: object = None


class PackedLayout:
    """Byte offsets of a message's tensors; recomputed only if the boundary's tensors change.

    Args:
        specs: each tensor's description.
        tensor_group: the tensor group over which partitioned tensors are sharded.
    """

    def __init__(self, specs: Sequence[TensorMeta], tensor_group: TensorGroup) -> None:
        self.specs = tuple(specs)
        self.tensor_group = tensor_group
        self.offsets: list[int] = []
        self.numels: list[int] = []
        end = 0
        for spec in self.specs:
            numel = math.prod(spec.shape)
            if self._is_sharded_tensor(spec):
                numel = -(-numel // tensor_group.size)
            start = -(-end // ALIGNMENT) * ALIGNMENT
            self.offsets.append(start)
            self.numels.append(numel)
            end = start + numel * spec.dtype.itemsize
        self.num_bytes = max(end, 1)
        self.is_sharded = any(map(self._is_sharded_tensor, self.specs))

    def _is_sharded_tensor(self, spec: TensorMeta) -> bool:
        return spec.partitioned and self.tensor_group.size > 1

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Pack the tensors into a message, uint8 [num_bytes]; a single contiguous tensor is not copied."""
        chunks = [self._local_bytes(t, spec) for t, spec in zip(tensors, self.specs, strict=True)]
        if len(chunks) == 1 and chunks[0].numel() == self.num_bytes:
            return chunks[0]
        message = self.new_buffer(tensors[0].device if tensors else torch.device("cpu"))
        for chunk, offset in zip(chunks, self.offsets, strict=True):
            message[offset : offset + chunk.numel()].copy_(chunk)
        return message

    def new_buffer(self, device: torch.device) -> torch.Tensor:
        """Allocate an uninitialised buffer, uint8 [num_bytes], for a received message."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def unpack(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Unpack a message. Collective over the tensor group if a tensor is partitioned."""
        tensors = []
        for spec, offset, numel in zip(self.specs, self.offsets, self.numels, strict=True):
            data = message[offset : offset + numel * spec.dtype.itemsize]
            if self._is_sharded_tensor(spec):
                data = self._gather(data, math.prod(spec.shape) * spec.dtype.itemsize)
            # .data, because tensors in one message share memory but must not share autograd's version counter.
            tensors.append(data.view(spec.dtype).view(spec.shape).data)
        return tensors

    def _local_bytes(self, tensor: torch.Tensor, spec: TensorMeta) -> torch.Tensor:
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        if self._is_sharded_tensor(spec):
            shard_numel = -(-flat.numel() // self.tensor_group.size)
            shard = flat[self.tensor_group.rank * shard_numel : (self.tensor_group.rank + 1) * shard_numel]
            if shard.numel() < shard_numel:
                shard = torch.cat([shard, shard.new_zeros(shard_numel - shard.numel())])
            flat = shard
        return flat.view(torch.uint8)

    def _gather(self, shard: torch.Tensor, num_bytes: int) -> torch.Tensor:
        full = shard.new_empty(shard.numel() * self.tensor_group.size)
        if full.numel():
            dist.all_gather_into_tensor(full, shard.contiguous(), group=self.tensor_group.group)
        return full[:num_bytes]

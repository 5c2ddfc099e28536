"""PackedLayout: the bytes of a message, which holds all tensors that cross a boundary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tds.p2p.tensor_meta import TensorMeta

# From tensors to bytes and back: one message holds all tensors that cross a boundary, whatever their dtypes.
#
# Layout of a message: each tensor's bytes at the next multiple of 64. A partitioned tensor travels as this rank's part
# of its flat elements, ``ceil(numel / t)`` of them, the last part filled up. A message is never empty: without any
# bytes it is one byte.

ALIGNMENT = 64


@dataclass(frozen=True)
class Slice:
    """The tensor (slice) group over which partitioned tensors are cut."""

    rank: int = 0
    size: int = 1
    group: object = None


class PackedLayout:
    """Where each tensor of a message lies in its bytes; computed again only if the tensors of the boundary change."""

    def __init__(self, specs: Sequence[TensorMeta], cut: Slice) -> None:
        self.specs = tuple(specs)
        self.cut = cut
        self.offsets: list[int] = []
        self.numels: list[int] = []
        end = 0
        for spec in self.specs:
            numel = math.prod(spec.shape)
            if self._is_cut(spec):
                numel = -(-numel // cut.size)
            start = -(-end // ALIGNMENT) * ALIGNMENT
            self.offsets.append(start)
            self.numels.append(numel)
            end = start + numel * spec.dtype.itemsize
        self.num_bytes = max(end, 1)
        self.is_cut = any(map(self._is_cut, self.specs))

    def _is_cut(self, spec: TensorMeta) -> bool:
        return spec.partitioned and self.cut.size > 1

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the message's bytes; those of a single contiguous tensor are not copied."""
        pieces = [self._local_bytes(t, spec) for t, spec in zip(tensors, self.specs, strict=True)]
        if len(pieces) == 1 and pieces[0].numel() == self.num_bytes:
            return pieces[0]
        message = self.new_buffer(tensors[0].device if tensors else torch.device("cpu"))
        for piece, offset in zip(pieces, self.offsets, strict=True):
            message[offset : offset + piece.numel()].copy_(piece)
        return message

    def new_buffer(self, device: torch.device) -> torch.Tensor:
        """Return bytes to receive a message into."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def unpack(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of a message. Collective over the tensor group where a tensor is partitioned."""
        tensors = []
        for spec, offset, numel in zip(self.specs, self.offsets, self.numels, strict=True):
            piece = message[offset : offset + numel * spec.dtype.itemsize]
            if self._is_cut(spec):
                piece = self._gather(piece, math.prod(spec.shape) * spec.dtype.itemsize)
            # .data: tensors of one message share memory but must not share autograd's count of in-place changes.
            tensors.append(piece.view(spec.dtype).view(spec.shape).data)
        return tensors

    def _local_bytes(self, tensor: torch.Tensor, spec: TensorMeta) -> torch.Tensor:
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        if self._is_cut(spec):
            part = -(-flat.numel() // self.cut.size)
            own = flat[self.cut.rank * part : (self.cut.rank + 1) * part]
            if own.numel() < part:
                own = torch.cat([own, own.new_zeros(part - own.numel())])
            flat = own
        return flat.view(torch.uint8)

    def _gather(self, piece: torch.Tensor, num_bytes: int) -> torch.Tensor:
        whole = piece.new_empty(piece.numel() * self.cut.size)
        if whole.numel():
            dist.all_gather_into_tensor(whole, piece.contiguous(), group=self.cut.group)
        return whole[:num_bytes]

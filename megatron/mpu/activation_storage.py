"""Storage of the inputs of recomputed layers between forward and backward.

| option | storage of an input of n bytes |
|---|---|
| none | the tensor itself |
| partitioned | n / t bytes on each tensor rank; gathered over the group before the layers are recomputed |
| on the host | n bytes of host memory (on CUDA pinned, and copied during the computation), none on the device |
| contiguous | a slot of one buffer, allocated at the first forward for the maximum number of stored inputs |

The options can be combined: a slice in a slot of a buffer on the host. They apply to inputs that require gradients,
which have the size of the hidden states and are the same on every tensor rank. Other inputs (tokens, documents, masks)
are small or shared by all layers of a micro-batch and remain in place. Each size of inputs has its own buffer. When a
new buffer is created, buffers with no slot in use are freed.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 6.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from megatron import device, log
from megatron.mpu.groups import SINGLE, Group
from megatron.torch_compat import all_gather_single


@dataclass(frozen=True)
class ActivationOffload:
    """Storage options. ``group``: the tensor ranks, which hold the same inputs and may store a slice each."""

    is_partitioned: bool = False
    is_on_host: bool = False
    is_contiguous: bool = False
    group: Group = SINGLE

    @property
    def is_plain(self) -> bool:
        """True if inputs remain in place."""
        return not (self.is_on_host or self.is_contiguous or (self.is_partitioned and self.group.size > 1))


class ActivationStorage:
    """Stores the inputs of recomputed runs of layers, each tensor once, and restores them in backward.

    Args:
        slots: returns two maximum numbers of stored tensors: of first inputs (runs per forward times forwards in
            flight), and of the other inputs, which all runs of a forward share, such as the encoder's output. Called
            at the first forward.
    """

    def __init__(self, how: ActivationOffload, slots: Callable[[], tuple[int, int]] = lambda: (1, 1)) -> None:
        self.how = how
        self._slots = slots
        self._buffers: dict[tuple[int, torch.dtype, bool], _Buffer] = {}
        self._seen = WeakIdKeyDictionary()  # tensor -> its stored form, which several runs may share
        self._waiting: weakref.WeakSet[_Kept] = weakref.WeakSet()

    def put_away(self, inputs: tuple[Any, ...]) -> Inputs:
        """Store ``inputs``; return an object that hands out the originals once and restored tensors afterwards."""
        stored = [
            self._keep(x, is_first=index == 0) if isinstance(x, torch.Tensor) and x.requires_grad else x
            for index, x in enumerate(inputs)
        ]
        return Inputs(inputs, stored)

    def waiting_bytes(self) -> int:
        """Return the number of bytes currently stored for backward, excluding free slots of buffers."""
        return sum(stored.held.nbytes for stored in self._waiting)

    def buffer_bytes(self) -> int:
        """Return the number of bytes of all buffers."""
        return sum(buffer.num_bytes for buffer in self._buffers.values())

    def _keep(self, x: torch.Tensor, *, is_first: bool) -> _Kept:
        """Store ``x``, unless it is stored already; ``is_first``: it is the first input of a run."""
        stored: _Kept | None = self._seen.get(x)
        if stored is None:
            stored = self._seen[x] = _Kept(x, self.how, self._room(x, is_first))
            self._waiting.add(stored)
        return stored

    def _room(self, x: torch.Tensor, is_first: bool) -> Callable[[torch.Tensor], tuple[torch.Tensor, Any]]:
        """Return a function that allocates memory for a slice of ``x``.

        The function returns the memory, and a function that releases it (None: the memory has no slot to release).
        """
        if not self.how.is_contiguous:
            return lambda part: (self._memory(part.shape, part), None)
        return lambda part: self._buffer(part, is_first).slot()

    def _buffer(self, part: torch.Tensor, is_first: bool) -> _Buffer:
        key = part.numel(), part.dtype, is_first
        if key not in self._buffers:
            self._buffers = {known: buffer for known, buffer in self._buffers.items() if not buffer.is_free}
            slots = self._slots()[0 if is_first else 1]
            shape, like = (slots, part.numel()), part.new_empty(0)  # not part itself, which the lambda would keep alive
            self._buffers[key] = _Buffer(slots, lambda: self._memory(shape, like))
        return self._buffers[key]

    def _memory(self, shape: Any, like: torch.Tensor) -> torch.Tensor:
        if self.how.is_on_host:
            return device.host_memory(shape, like.dtype, like.device)
        return torch.empty(shape, dtype=like.dtype, device=like.device)


class Inputs:
    """Inputs of one run of layers."""

    def __init__(self, originals: tuple[Any, ...], places: list[Any]) -> None:
        self._originals: tuple[Any, ...] | None = originals
        self._places = places

    def take(self) -> tuple[Any, ...]:
        """Return the originals on the first call, then restored tensors, which is collective if partitioned."""
        if self._originals is not None:
            originals, self._originals = self._originals, None
            return originals
        return tuple(item.restored() if isinstance(item, _Kept) else item for item in self._places)


class _Kept:
    """A stored tensor."""

    def __init__(
        self, x: torch.Tensor, how: ActivationOffload, find_room: Callable[[torch.Tensor], tuple[torch.Tensor, Any]]
    ) -> None:
        self.how, self.shape, self.device = how, x.shape, x.device
        shard = self._own_part(x.detach())
        self.held, give_back = find_room(shard)
        if give_back is not None:
            weakref.finalize(self, give_back).atexit = False
        if how.is_on_host:
            device.copy_to_host(self.held, shard)
        else:
            self.held.copy_(shard)

    def restored(self) -> torch.Tensor:
        """Return a copy of the stored tensor that requires a gradient. Collective if partitioned."""
        shard = device.copy_from_host(self.held, self.device) if self.how.is_on_host else self.held
        full = _gathered(shard, self.shape, self.how.group) if self._is_cut else shard.view(self.shape)
        return full.detach().requires_grad_()

    @property
    def _is_cut(self) -> bool:
        return self.how.is_partitioned and self.how.group.size > 1

    def _own_part(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the flattened ``x``; the last slice is padded with zeros."""
        flat, group = x.reshape(-1), self.how.group
        if not self._is_cut:
            return flat
        length = -(-flat.numel() // group.size)
        shard = flat[group.rank * length : (group.rank + 1) * length]
        return torch.cat([shard, shard.new_zeros(length - shard.numel())]) if shard.numel() < length else shard


def _gathered(part: torch.Tensor, shape: torch.Size, group: Group) -> torch.Tensor:
    """Gather the slices of all ranks into a tensor of ``shape``. Collective."""
    gathered = part.new_empty(group.size * part.numel())
    all_gather_single(gathered, part, group=group.handle)
    return gathered[: shape.numel()].view(shape)


class _Buffer:
    """Memory for tensors of one size, divided into slots. A full buffer grows by ``slots`` more and logs a warning."""

    def __init__(self, slots: int, make: Callable[[], torch.Tensor]) -> None:
        self._make = make
        self._blocks = [make()]
        self._free = list(reversed(self._blocks[0].unbind()))
        self._size = slots

    @property
    def is_free(self) -> bool:
        """True if no slot is in use."""
        return len(self._free) == sum(map(len, self._blocks))

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def slot(self) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return a free slot and a function that releases it."""
        if not self._free:
            log.warning(f"--contigious-checkpointing: all {self._size} slots of a buffer are used; the buffer grows")
            self._blocks.append(self._make())
            self._free.extend(reversed(self._blocks[-1].unbind()))
        slot = self._free.pop()
        return slot, lambda: self._free.append(slot)

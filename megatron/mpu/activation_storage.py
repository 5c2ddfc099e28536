"""Storage for inputs of recomputed layers between forward and backward.

| option | storage of an input of n bytes |
|---|---|
| none | the tensor itself |
| partitioned | n / t bytes on each tensor rank; gathered over the group before the layers are recomputed |
| on the host | n bytes of host memory (on CUDA pinned, and copied during the computation), none on the device |
| contiguous | a slot of one buffer, allocated at the first forward for the maximum number of stored inputs |

The options can be combined. With all three, an input is stored as a slice in a slot of a host buffer. The options apply
to inputs that require gradients, which have the size of the hidden states and are the same on every tensor rank. Other
inputs (tokens, documents, masks) are small or shared by all layers of a micro-batch and remain in place. Each input
size has its own buffer. When a new buffer is created, buffers with no slot in use are freed.

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
    """Storage options. ``group``: tensor ranks, which hold the same inputs and may each store a slice."""

    is_partitioned: bool = False
    is_on_host: bool = False
    is_contiguous: bool = False
    group: Group = SINGLE

    @property
    def is_plain(self) -> bool:
        """True if inputs remain in place."""
        return not (self.is_on_host or self.is_contiguous or (self.is_partitioned and self.group.size > 1))


class ActivationStorage:
    """Stores the inputs of checkpointed layer groups, each tensor once, and restores them in backward.

    Args:
        get_num_slots: returns two maximum numbers of tensors that are stored at the same time. The first one counts
            first inputs of groups: groups per forward times forwards in flight. The second one counts other inputs,
            such as the encoder's output, which all groups in a forward share. Called at the first forward.
    """

    def __init__(
        self, options: ActivationOffload, get_num_slots: Callable[[], tuple[int, int]] = lambda: (1, 1)
    ) -> None:
        self.options = options
        self._get_num_slots = get_num_slots
        self._buffers: dict[tuple[int, torch.dtype, bool], _SlotBuffer] = {}
        self._stored_by_tensor = WeakIdKeyDictionary()  # tensor -> its stored form, which several groups may share
        self._stored_inputs: weakref.WeakSet[_StoredInput] = weakref.WeakSet()

    def store(self, inputs: tuple[Any, ...]) -> StoredInputs:
        """Store ``inputs``; return an object that returns the originals once and restored tensors afterwards."""
        stored = [
            self._store_input(x, is_first=index == 0) if isinstance(x, torch.Tensor) and x.requires_grad else x
            for index, x in enumerate(inputs)
        ]
        return StoredInputs(inputs, stored)

    def stored_bytes(self) -> int:
        """Return the bytes currently stored for backward, excluding free buffer slots."""
        return sum(stored.storage.nbytes for stored in self._stored_inputs)

    def buffer_bytes(self) -> int:
        """Return the total buffer size in bytes."""
        return sum(buffer.num_bytes for buffer in self._buffers.values())

    def _store_input(self, x: torch.Tensor, *, is_first: bool) -> _StoredInput:
        """Store ``x``, unless it is stored already; ``is_first``: it is a group's first input."""
        stored: _StoredInput | None = self._stored_by_tensor.get(x)
        if stored is None:
            stored = self._stored_by_tensor[x] = _StoredInput(x, self.options, self._allocator(x, is_first))
            self._stored_inputs.add(stored)
        return stored

    def _allocator(self, x: torch.Tensor, is_first: bool) -> Callable[[torch.Tensor], tuple[torch.Tensor, Any]]:
        """Return a function that allocates memory for a slice of ``x``.

        It returns the memory, and a function to release it (None: the memory has no slot to release).
        """
        if not self.options.is_contiguous:
            return lambda shard: (self._allocate(shard.shape, shard), None)
        return lambda shard: self._buffer(shard, is_first).acquire_slot()

    def _buffer(self, shard: torch.Tensor, is_first: bool) -> _SlotBuffer:
        key = shard.numel(), shard.dtype, is_first
        if key not in self._buffers:
            self._buffers = {other_key: buffer for other_key, buffer in self._buffers.items() if not buffer.is_free}
            num_slots = self._get_num_slots()[0 if is_first else 1]
            shape, like = (
                (num_slots, shard.numel()),
                shard.new_empty(0),
            )  # instead of ``shard``, which the lambda would keep alive
            self._buffers[key] = _SlotBuffer(num_slots, lambda: self._allocate(shape, like))
        return self._buffers[key]

    def _allocate(self, shape: Any, like: torch.Tensor) -> torch.Tensor:
        if self.options.is_on_host:
            return device.host_memory(shape, like.dtype, like.device)
        return torch.empty(shape, dtype=like.dtype, device=like.device)


class StoredInputs:
    """One layer group's inputs."""

    def __init__(self, originals: tuple[Any, ...], stored: list[Any]) -> None:
        self._originals: tuple[Any, ...] | None = originals
        self._stored = stored

    def restore(self) -> tuple[Any, ...]:
        """Return the originals on the first call, then restored tensors. Restoring is collective if partitioned."""
        if self._originals is not None:
            originals, self._originals = self._originals, None
            return originals
        return tuple(item.restore() if isinstance(item, _StoredInput) else item for item in self._stored)


class _StoredInput:
    """A stored tensor."""

    def __init__(
        self, x: torch.Tensor, options: ActivationOffload, allocate: Callable[[torch.Tensor], tuple[torch.Tensor, Any]]
    ) -> None:
        self.options, self.shape, self.device = options, x.shape, x.device
        shard = self._local_shard(x.detach())
        self.storage, release_slot = allocate(shard)
        if release_slot is not None:
            weakref.finalize(self, release_slot).atexit = False
        if options.is_on_host:
            device.copy_to_host(self.storage, shard)
        else:
            self.storage.copy_(shard)

    def restore(self) -> torch.Tensor:
        """Return a copy of the stored tensor with ``requires_grad`` set. Collective if partitioned."""
        shard = device.copy_from_host(self.storage, self.device) if self.options.is_on_host else self.storage
        full = _gather(shard, self.shape, self.options.group) if self._is_sharded else shard.view(self.shape)
        return full.detach().requires_grad_()

    @property
    def _is_sharded(self) -> bool:
        return self.options.is_partitioned and self.options.group.size > 1

    def _local_shard(self, x: torch.Tensor) -> torch.Tensor:
        """Slice the flattened ``x`` for this rank; the last slice is padded with zeros."""
        flat, group = x.reshape(-1), self.options.group
        if not self._is_sharded:
            return flat
        length = -(-flat.numel() // group.size)
        shard = flat[group.rank * length : (group.rank + 1) * length]
        return torch.cat([shard, shard.new_zeros(length - shard.numel())]) if shard.numel() < length else shard


def _gather(shard: torch.Tensor, shape: torch.Size, group: Group) -> torch.Tensor:
    """Gather all ranks' slices into a tensor with shape ``shape``. Collective."""
    gathered = shard.new_empty(group.size * shard.numel())
    all_gather_single(gathered, shard, group=group.handle)
    return gathered[: shape.numel()].view(shape)


class _SlotBuffer:
    """Memory for equally large tensors, divided into slots. A full buffer grows by ``num_slots`` and logs a warning."""

    def __init__(self, num_slots: int, allocate: Callable[[], torch.Tensor]) -> None:
        self._allocate = allocate
        self._blocks = [allocate()]
        self._free = list(reversed(self._blocks[0].unbind()))
        self._num_slots = num_slots

    @property
    def is_free(self) -> bool:
        """True if no slot is in use."""
        return len(self._free) == sum(map(len, self._blocks))

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def acquire_slot(self) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return a free slot and a function that releases it."""
        if not self._free:
            log.warning(
                f"--contigious-checkpointing: all {self._num_slots} slots of a buffer are used; the buffer grows"
            )
            self._blocks.append(self._allocate())
            self._free.extend(reversed(self._blocks[-1].unbind()))
        slot = self._free.pop()
        return slot, lambda: self._free.append(slot)

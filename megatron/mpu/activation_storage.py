"""Where the inputs of recomputed layers wait for their backward.

| asked for | an input of n bytes, between forward and backward |
|---|---|
| nothing | itself |
| partitioned | n / t on each tensor rank; gathered over the group before layers are run again |
| on the host | nothing on the device, n in the memory of the host, pinned on CUDA and copied beside the computation |
| contiguous | a slot of one buffer, which is made at the first forward for all that will ever wait |

All three go together: a slice, in a slot, in a buffer of the host. It is the inputs that a gradient flows to, for these
are of the size of the hidden states and the same on every tensor rank. Others (tokens, documents, masks) are small or
shared by all layers of a micro-batch and wait as they are. Inputs of another size have a buffer of their own; when one
is made, those in which nothing waits are given back.

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
    """How inputs wait. ``group``: the tensor ranks, which hold the same inputs and may hold a part each."""

    is_partitioned: bool = False
    is_on_host: bool = False
    is_contiguous: bool = False
    group: Group = SINGLE

    @property
    def is_plain(self) -> bool:
        """Whether inputs wait as they come."""
        return not (self.is_on_host or self.is_contiguous or (self.is_partitioned and self.group.size > 1))


class ActivationStorage:
    """Puts the inputs of recomputed runs of layers away, each once, and brings them back.

    Args:
        slots: how many runs wait for their backward at most: runs of a forward times forwards in flight. The same for
            what a forward hands to all its runs, such as the encoder's output. Asked at the first forward.
    """

    def __init__(self, how: ActivationOffload, slots: Callable[[], tuple[int, int]] = lambda: (1, 1)) -> None:
        self.how = how
        self._slots = slots
        self._buffers: dict[tuple[int, torch.dtype, bool], _Buffer] = {}
        self._seen = WeakIdKeyDictionary()  # tensor -> what was put away for it, which several runs may share
        self._waiting: weakref.WeakSet[_Kept] = weakref.WeakSet()

    def put_away(self, inputs: tuple[Any, ...]) -> Inputs:
        """Return what gives ``inputs`` once as they are, and equal ones whenever it is asked again."""
        places = [
            self._keep(x, is_first=index == 0) if isinstance(x, torch.Tensor) and x.requires_grad else x
            for index, x in enumerate(inputs)
        ]
        return Inputs(inputs, places)

    def waiting_bytes(self) -> int:
        """Return the bytes of what waits for a backward now, buffers' free slots aside."""
        return sum(kept.held.nbytes for kept in self._waiting)

    def buffer_bytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(buffer.num_bytes for buffer in self._buffers.values())

    def _keep(self, x: torch.Tensor, *, is_first: bool) -> _Kept:
        kept: _Kept | None = self._seen.get(x)
        if kept is None:
            kept = self._seen[x] = _Kept(x, self.how, self._room(x, is_first))
            self._waiting.add(kept)
        return kept

    def _room(self, x: torch.Tensor, is_first: bool) -> Callable[[torch.Tensor], tuple[torch.Tensor, Any]]:
        """Return what finds a place for a part of ``x``: (tensor of its size, how to give it back)."""
        if not self.how.is_contiguous:
            return lambda part: (self._memory(part.shape, part), None)
        return lambda part: self._buffer(part, is_first).slot()

    def _buffer(self, part: torch.Tensor, is_first: bool) -> _Buffer:
        key = part.numel(), part.dtype, is_first
        if key not in self._buffers:
            self._buffers = {known: buffer for known, buffer in self._buffers.items() if not buffer.is_free}
            slots = self._slots()[0 if is_first else 1]
            shape, like = (slots, part.numel()), part.new_empty(0)  # not part itself, which would wait for ever
            self._buffers[key] = _Buffer(slots, lambda: self._memory(shape, like))
        return self._buffers[key]

    def _memory(self, shape: Any, like: torch.Tensor) -> torch.Tensor:
        if self.how.is_on_host:
            return device.host_memory(shape, like.dtype, like.device)
        return torch.empty(shape, dtype=like.dtype, device=like.device)


class Inputs:
    """The inputs of one run of layers."""

    def __init__(self, originals: tuple[Any, ...], places: list[Any]) -> None:
        self._originals: tuple[Any, ...] | None = originals
        self._places = places

    def take(self) -> tuple[Any, ...]:
        """Return the inputs; from the second time on those that were put away. Collective then, where partitioned."""
        if self._originals is not None:
            originals, self._originals = self._originals, None
            return originals
        return tuple(place.restored() if isinstance(place, _Kept) else place for place in self._places)


class _Kept:
    """One tensor while it waits."""

    def __init__(
        self, x: torch.Tensor, how: ActivationOffload, find_room: Callable[[torch.Tensor], tuple[torch.Tensor, Any]]
    ) -> None:
        self.how, self.shape, self.device = how, x.shape, x.device
        part = self._own_part(x.detach())
        self.held, give_back = find_room(part)
        if give_back is not None:
            weakref.finalize(self, give_back).atexit = False
        if how.is_on_host:
            device.copy_to_host(self.held, part)
        else:
            self.held.copy_(part)

    def restored(self) -> torch.Tensor:
        """Return a tensor like the one that was put away."""
        part = device.copy_from_host(self.held, self.device) if self.how.is_on_host else self.held
        whole = _gathered(part, self.shape, self.how.group) if self._is_cut else part.view(self.shape)
        return whole.detach().requires_grad_()

    @property
    def _is_cut(self) -> bool:
        return self.how.is_partitioned and self.how.group.size > 1

    def _own_part(self, x: torch.Tensor) -> torch.Tensor:
        """Return the numbers of ``x`` that this rank keeps, in a row; zeros fill up the last rank's."""
        row, group = x.reshape(-1), self.how.group
        if not self._is_cut:
            return row
        length = -(-row.numel() // group.size)
        part = row[group.rank * length : (group.rank + 1) * length]
        return torch.cat([part, part.new_zeros(length - part.numel())]) if part.numel() < length else part


def _gathered(part: torch.Tensor, shape: torch.Size, group: Group) -> torch.Tensor:
    """Return the tensor of which each rank holds a part. Collective."""
    every = part.new_empty(group.size * part.numel())
    all_gather_single(every, part, group=group.handle)
    return every[: shape.numel()].view(shape)


class _Buffer:
    """Memory for tensors of one size, given out in slots. One that is full grows by as much again, and says so."""

    def __init__(self, slots: int, make: Callable[[], torch.Tensor]) -> None:
        self._make = make
        self._blocks = [make()]
        self._free = list(reversed(self._blocks[0].unbind()))
        self._size = slots

    @property
    def is_free(self) -> bool:
        """Whether nothing waits in it."""
        return len(self._free) == sum(map(len, self._blocks))

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def slot(self) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return a slot, and what gives it back."""
        if not self._free:
            log.warning(f"the buffer of --contigious-checkpointing holds {self._size} inputs, one more waits: it grows")
            self._blocks.append(self._make())
            self._free.extend(reversed(self._blocks[-1].unbind()))
        place = self._free.pop()
        return place, lambda: self._free.append(place)

"""Count the bytes of live tensors at every operation."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Tracks the memory of tensors that operations in the block create on devices of type ``kind``.

    Attributes:
        peak: maximum number of live bytes.
        largest: bytes of the largest storage.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.peak, self.largest = kind, 0, 0
        self._storages: WeakSet[torch.UntypedStorage] = WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = len(self._storages)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self.kind:
                self._storages.add(leaf.untyped_storage())
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        if len(self._storages) > before:
            self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Return the number of live bytes."""
        return sum({storage._cdata: storage.nbytes() for storage in self._storages}.values())

"""Count the bytes of live tensors at every operation."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemoryTracker(TorchDispatchMode):
    """Tracks the memory of tensors that operations in the block create on devices of type ``device_type``.

    Attributes:
        peak_bytes: maximum number of live bytes.
        largest_bytes: bytes of the largest storage.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type, self.peak_bytes, self.largest_bytes = device_type, 0, 0
        self._storages: WeakSet[torch.UntypedStorage] = WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        num_before = len(self._storages)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self.device_type:
                self._storages.add(leaf.untyped_storage())
                self.largest_bytes = max(self.largest_bytes, leaf.untyped_storage().nbytes())
        if len(self._storages) > num_before:
            self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return result

    def live_bytes(self) -> int:
        """Return the number of live bytes."""
        return sum({storage._cdata: storage.nbytes() for storage in self._storages}.values())

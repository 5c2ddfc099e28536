"""A micro-batch of the host whose tensors are copied to the device while it computes something else."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron import device


class Upload(dict[str, torch.Tensor]):
    """The tensors of a micro-batch as they were read, whose copies are on their way to a device.

    To a program it is the dictionary on the host that it is without a device. ``broadcast_data`` takes the copies, and
    copies anew what the program has replaced or changed in place meanwhile.
    """

    def __init__(self, batch: Mapping[str, torch.Tensor], place: torch.device) -> None:
        super().__init__(batch)
        self._place = place
        self._copies, self._uploaded = device.start_upload(batch, place)
        self._batch = dict(batch)  # keeps these tensors, and so their ids
        self._read = {name: (id(tensor), tensor._version) for name, tensor in batch.items()}
        self._is_awaited = False

    def on_device(self, name: str) -> torch.Tensor:
        """Return tensor ``name`` on the device, which waits for it where it must; the host does not."""
        tensor = self[name]
        if self._read.get(name) != (id(tensor), tensor._version):
            return tensor.to(self._place, non_blocking=True)
        if not self._is_awaited:
            device.await_upload(self._copies.values(), self._place, self._uploaded)
            self._is_awaited = True
        return self._copies[name]

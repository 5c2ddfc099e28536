"""A copy of a rank's tensors on the host, so that training may change the originals during a save."""

from __future__ import annotations

import mmap
from dataclasses import replace

import torch

from megatron import device
from megatron.checkpoint.tensor_record import TensorRecord, owned


class StagingBuffer:
    """Host memory for one copy of what a rank owns, kept from save to save: only the first one pays for the pages."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, records: list[TensorRecord]) -> tuple[list[TensorRecord], int]:
        """Return ``records`` with the values of now, and how many bytes were copied.

        What this rank does not own has shape and type only. The copies are good until the next call.
        """
        mine = owned(records)
        num_bytes = sum(record.tensor.nbytes for record in mine.values())
        self._make_room(num_bytes, any(device.can_pin(record.tensor.device.type) for record in mine.values()))
        copies: dict[int, TensorRecord] = {}
        start = 0
        for place, record in mine.items():  # the widest types come first, so that each start is a multiple of the type
            stop = start + record.tensor.nbytes
            held = self._memory[start:stop].view(record.tensor.dtype).view(record.tensor.shape)
            held.copy_(record.tensor, non_blocking=True)
            copies[place] = replace(record, tensor=held)
            start = stop
        for source in {record.tensor.device for record in mine.values()}:
            device.finish_copies(source)
        return [copies.get(i) or _without_values(record) for i, record in enumerate(records)], num_bytes

    def _make_room(self, num_bytes: int, is_pinned: bool) -> None:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # first give back what is too small
            if is_pinned:
                self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            else:
                self._memory = torch.frombuffer(_large_pages(num_bytes), dtype=torch.uint8)


def _large_pages(num_bytes: int) -> mmap.mmap:
    """Return fresh memory in pages of 2 MiB where the system has them: their first use costs a tenth of small ones'."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _without_values(record: TensorRecord) -> TensorRecord:
    return replace(record, tensor=torch.empty_like(record.tensor, device="meta"))

"""A host copy of a rank's tensors, so that training may change the originals during a save."""

from __future__ import annotations

import mmap
from dataclasses import replace

import torch

from megatron import device
from megatron.checkpoint.tensor_record import TensorRecord, select_owned


class StagingBuffer:
    """Host memory for a copy of the tensors that a rank owns.

    It is reused from save to save, so that page faults slow down only the first save.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, records: list[TensorRecord]) -> tuple[list[TensorRecord], int]:
        """Return ``records`` with copies of the current values, and the copied byte count.

        Records that this rank does not own get a meta tensor. The copies are valid until the next call.
        """
        owned_records = select_owned(records)
        num_bytes = sum(record.tensor.nbytes for record in owned_records.values())
        self._reserve(num_bytes, any(device.can_pin(record.tensor.device.type) for record in owned_records.values()))
        copies: dict[int, TensorRecord] = {}
        start = 0
        for idx, record in owned_records.items():  # largest element size first, so that every start is aligned
            stop = start + record.tensor.nbytes
            staged = self._memory[start:stop].view(record.tensor.dtype).view(record.tensor.shape)
            staged.copy_(record.tensor, non_blocking=True)
            copies[idx] = replace(record, tensor=staged)
            start = stop
        for source_device in {record.tensor.device for record in owned_records.values()}:
            device.finish_copies(source_device)
        return [copies.get(i) or _to_meta(record) for i, record in enumerate(records)], num_bytes

    def _reserve(self, num_bytes: int, is_pinned: bool) -> None:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the smaller buffer before allocating
            if is_pinned:
                self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            else:
                self._memory = torch.frombuffer(_map_huge_pages(num_bytes), dtype=torch.uint8)


def _map_huge_pages(num_bytes: int) -> mmap.mmap:
    """Map new memory with 2 MiB pages if available, which reduces page fault costs to a tenth."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _to_meta(record: TensorRecord) -> TensorRecord:
    return replace(record, tensor=torch.empty_like(record.tensor, device="meta"))

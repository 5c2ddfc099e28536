"""Small token files for the data tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron.data import IndexedDataset, IndexedDatasetBuilder


def write(prefix: Path, sizes: list[int], *, vocab_size: int = 50_000, eod_id: int | None = None) -> IndexedDataset:
    """Write documents of these sizes; tokens count up through the whole file, so that each can be identified."""
    first = 1
    with IndexedDatasetBuilder(prefix, vocab_size=vocab_size, tokenizer="t", eod_id=eod_id) as writer:
        for size in sizes:
            tokens = np.arange(first, first + size)
            if eod_id is not None and size:
                tokens[-1] = eod_id
            writer.add(tokens)
            first += size
    return IndexedDataset(prefix)


def write_megatron(prefix: Path, sizes: list[int], starts: list[int]) -> None:
    """Write a pair of files like Megatron-LM's, without a sidecar; documents may be empty or have several sequences."""
    lengths = np.array(sizes, "<i4")
    offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8])
    counts = len(sizes).to_bytes(8, "little") + len(starts).to_bytes(8, "little")
    arrays = lengths.tobytes() + offsets.astype("<i8").tobytes() + np.array(starts, "<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(head + counts + arrays)
    prefix.with_suffix(".bin").write_bytes(np.arange(sum(sizes), dtype="<u2").tobytes())

"""Small token files for the data tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron.data import IndexedDataset, IndexedDatasetBuilder


def write_documents(
    prefix: Path, lengths: list[int], *, vocab_size: int = 50_000, eod_id: int | None = None
) -> IndexedDataset:
    """Write documents of these sizes; tokens count up through the whole file, so that each can be identified."""
    next_token = 1
    with IndexedDatasetBuilder(prefix, vocab_size=vocab_size, tokenizer="t", eod_id=eod_id) as writer:
        for length in lengths:
            tokens = np.arange(next_token, next_token + length)
            if eod_id is not None and length:
                tokens[-1] = eod_id
            writer.add(tokens)
            next_token += length
    return IndexedDataset(prefix)


def write_megatron_files(prefix: Path, sequence_lengths: list[int], starts: list[int]) -> None:
    """Write a pair of files like Megatron-LM's, without a sidecar; documents may be empty or have several sequences."""
    lengths = np.array(sequence_lengths, "<i4")
    offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    header = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8])
    counts = len(sequence_lengths).to_bytes(8, "little") + len(starts).to_bytes(8, "little")
    arrays = lengths.tobytes() + offsets.astype("<i8").tobytes() + np.array(starts, "<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(header + counts + arrays)
    prefix.with_suffix(".bin").write_bytes(np.arange(sum(sequence_lengths), dtype="<u2").tobytes())


def write_token_files(prefix: Path, lengths: np.ndarray, *, first_token: int = 1) -> None:
    """Write a pair of files without a sidecar; tokens (int32) count up from ``first_token``; documents may be empty."""
    lengths = np.asarray(lengths).astype("<i4")
    offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * 4
    header = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([4])
    counts = len(lengths).to_bytes(8, "little") + (len(lengths) + 1).to_bytes(8, "little")
    arrays = lengths.tobytes() + offsets.astype("<i8").tobytes() + np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(header + counts + arrays)
    tokens = np.arange(first_token, first_token + int(lengths.sum()), dtype="<i4")
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())

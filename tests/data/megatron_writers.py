"""``.idx`` files byte for byte as Megatron-LM's two writers make them, in a few lines of our own.

Read off megatron/data/indexed_dataset.py (commit 0058b1a of 2020) and megatron/core/datasets/indexed_dataset.py (commit
00caa53) of NVIDIA/Megatron-LM.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES_2020 = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float": 6, "double": 7, "uint16": 8}
CODES_CORE = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_2020(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str) -> None:
    """Documents of sentences, with an array each of sizes, pointers and document index; no document starts twice."""
    lengths, starts, content = [], [0], b""
    for document in documents:
        for sentence in document:
            content += np.array(sentence, dtype).tobytes(order="C")
            lengths.append(len(sentence))
        starts.append(len(lengths))
    pointers, address = [], 0
    for length in lengths:
        pointers.append(address)
        address += length * np.dtype(dtype).itemsize
    with open(f"{prefix}.idx", "wb") as index:
        index.write(b"MMIDIDX\x00\x00")
        index.write(struct.pack("<Q", 1))
        index.write(struct.pack("<B", CODES_2020[dtype]))
        index.write(struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(starts)))
        index.write(np.array(lengths, np.int32).tobytes() + np.array(pointers, np.int64).tobytes())
        index.write(np.array(starts, np.int64).tobytes())
    Path(f"{prefix}.bin").write_bytes(content)


def write_core(
    prefix: Path,
    documents: Sequence[Sequence[Sequence[int]]],
    dtype: str,
    modes: Sequence[int] | None = None,
    dtype_code: int | None = None,
) -> None:
    """The same header and arrays; multimodal sets end with a mode (int8) for each sequence."""
    lengths = [len(sequence) for document in documents for sequence in document]
    ends = np.cumsum([0, *lengths], dtype=np.int64) * np.dtype(dtype).itemsize
    starts = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    flat = [token for document in documents for sequence in document for token in sequence]
    index = struct.pack("<9sQB", b"MMIDIDX\x00\x00", 1, CODES_CORE[dtype] if dtype_code is None else dtype_code)
    index += struct.pack("<QQ", len(lengths), len(starts))
    index += np.array(lengths, np.int32).tobytes() + ends[:-1].tobytes() + starts.tobytes()
    if modes is not None:
        index += np.array(modes, np.int8).tobytes()
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(np.array(flat, dtype).tobytes())

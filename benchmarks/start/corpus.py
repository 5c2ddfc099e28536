"""A corpus of any number of documents in seconds: a real ``.idx``, and a ``.bin`` that is one hole."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron.data.index_format import DatasetMetadata, index_chunks

LONGEST_DOCUMENT = 999
_VOCAB_SIZE = 50_000
_BLOCK = 1 << 20


def make_corpus(prefix: Path, num_documents: int) -> int:
    """Write ``PREFIX.idx``, ``.bin`` and ``.meta.json``: documents of 1 ... 999 zeros. Return how many tokens."""

    def sizes() -> Iterator[np.ndarray]:
        generator = np.random.default_rng(0)
        for first in range(0, num_documents, _BLOCK):
            yield generator.integers(1, LONGEST_DOCUMENT + 1, min(_BLOCK, num_documents - first), np.int32)

    dtype, crc32 = np.dtype(np.uint16), 0
    with open(f"{prefix}.idx", "wb") as file:
        for chunk in index_chunks(sizes, num_documents, dtype):
            file.write(chunk)
            crc32 = zlib.crc32(chunk, crc32)
    num_tokens = sum(int(block.sum(dtype=np.int64)) for block in sizes())
    Path(f"{prefix}.bin").touch()
    os.truncate(f"{prefix}.bin", num_tokens * dtype.itemsize)
    sidecar = DatasetMetadata(
        num_tokens=num_tokens,
        num_documents=num_documents,
        max_token_id=0,
        vocab_size=_VOCAB_SIZE,
        tokenizer="",
        eod_id=None,
        has_eod=False,
        bin_bytes=num_tokens * dtype.itemsize,
        bin_crc32=0,
        idx_crc32=crc32,
    )
    Path(f"{prefix}.meta.json").write_bytes(sidecar.to_json())
    return num_tokens

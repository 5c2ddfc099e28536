"""Write an ``.idx`` in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from megatron.data.index_format import HEADER, MAGIC, TOKEN_TYPES, VERSION

_STARTS_PER_CHUNK = 1 << 20


def index_chunks(
    blocks: Callable[[], Iterable[np.ndarray]], num_documents: int, dtype: np.dtype
) -> Iterator[bytes | memoryview]:
    """Generate the bytes of an ``.idx`` with one sequence per document, holding only one block in memory.

    Args:
        blocks: iterates over the document sizes in order, in arrays with any length; called once per pass.
        num_documents: document count in all blocks.
        dtype: token type in the ``.bin``.
    """
    codes = {np.dtype(token_type): code for code, token_type in TOKEN_TYPES.items()}
    yield HEADER.pack(MAGIC, VERSION, codes[dtype], num_documents, num_documents + 1)
    for lengths in blocks():
        yield lengths.astype("<i4").data.cast("B")
    start = 0
    for lengths in blocks():
        ends = start + np.cumsum(lengths, dtype=np.int64)
        yield ((ends - lengths) * dtype.itemsize).astype("<i8").data.cast("B")
        start = int(ends[-1])
    for first in range(0, num_documents + 1, _STARTS_PER_CHUNK):
        yield np.arange(first, min(first + _STARTS_PER_CHUNK, num_documents + 1), dtype="<i8").data.cast("B")

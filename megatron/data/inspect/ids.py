"""The token ids of a whole file, read once from its start to its end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron.data.token_file import TokenFile
from megatron.errors import DataError

_BLOCK = 1 << 22
_MOST_IDS = 1 << 24


def largest(token_file: TokenFile) -> int:
    """Return the largest token id of the file, -1 where it holds none."""
    return max((int(block.max()) for block in _blocks(token_file)), default=-1)


def counts(token_file: TokenFile) -> np.ndarray:
    """Return how often each id occurs, int64[largest id + 1].

    Raises:
        DataError: ids that no vocabulary has, below 0 or beyond 16 million.
    """
    totals = np.zeros(0, np.int64)
    for block in _blocks(token_file):
        lowest, highest = int(block.min()), int(block.max())
        if lowest < 0 or highest >= _MOST_IDS:
            raise DataError(
                f"{token_file.token_path}: token ids must be in 0 ... {_MOST_IDS - 1} to be counted, got {lowest} ... "
                f"{highest}. The file is damaged, or of another token type than its .idx says: build it again."
            )
        found = np.bincount(block.astype(np.int64))
        totals = np.pad(totals, (0, max(len(found) - len(totals), 0)))
        totals[: len(found)] += found
    return totals


def _blocks(token_file: TokenFile) -> Iterator[np.ndarray]:
    with open(token_file.token_path, "rb") as file:
        while len(block := np.fromfile(file, token_file.dtype, _BLOCK)):
            yield block

"""How long the documents of a corpus are: each length that occurs with its number of documents.

Counted in blocks, so that memory follows the number of different lengths rather than that of documents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_BLOCK = 1 << 22


@dataclass(frozen=True)
class Lengths:
    """``values``, rising, int64, and how many documents have each, ``counts``, int64; both empty without documents."""

    values: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, sizes: np.ndarray) -> Lengths:
        """Return the lengths in ``sizes``, an array of any kind that can be cut: mapped and unaligned ones too."""
        values, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for start in range(0, len(sizes), _BLOCK):
            found = np.unique(np.array(sizes[start : start + _BLOCK]), return_counts=True)
            values, counts = _joined(values, counts, found[0].astype(np.int64), found[1].astype(np.int64))
        return cls(values, counts)

    @property
    def num_documents(self) -> int:
        return int(self.counts.sum())

    @property
    def num_empty(self) -> int:
        """Documents without a token."""
        return int(self.counts[self.values == 0].sum())

    @property
    def mean(self) -> float:
        """Tokens of a document on average; NaN without documents."""
        return float(self.values @ self.counts) / self.num_documents if self.num_documents else math.nan

    def quantile(self, share: float) -> int:
        """Return the smallest length that at least ``share`` of the documents do not exceed; 0 gives the shortest.

        Raises:
            ValueError: there are no documents.
        """
        if not self.num_documents:
            raise ValueError("quantiles need at least one document, got none")
        below = np.cumsum(self.counts)
        needed = max(math.ceil(share * self.num_documents), 1)
        return int(self.values[np.searchsorted(below, needed, "left")])

    def histogram(self, bounds: np.ndarray) -> np.ndarray:
        """Return how many documents have bounds[i] <= length < bounds[i + 1], for each i."""
        below = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts)])
        return np.diff(below[np.searchsorted(self.values, bounds, "left")])


def _joined(
    values: np.ndarray, counts: np.ndarray, more_values: np.ndarray, more_counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    joined, places = np.unique(np.concatenate([values, more_values]), return_inverse=True)
    totals = np.zeros(len(joined), np.int64)
    np.add.at(totals, places, np.concatenate([counts, more_counts]))
    return joined, totals

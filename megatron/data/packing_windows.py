"""Samples of whole documents, packed best-fit: the counterpart of ``windows`` for ``--packing best-fit``.

How many pieces of which length meet in a sample follows from the lengths alone and is worked out once. An epoch
chooses which of the documents of a length takes which of its places, and then the order of the samples, by
permutations that are computed from (seed, epoch). So an epoch stores nothing, and is the same in every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from megatron.data.cache import Cache
from megatron.data.documents import Documents, count_of, documents_key, sizes_of
from megatron.data.packing import Share, best_fit
from megatron.data.packing_lengths import Keep, Pieces
from megatron.data.permutation import Permutation
from megatron.data.windows import Piece, TokenSource
from megatron.errors import DataError

_FORMAT = 1
_KEPT_FROM = 1 << 22  # documents; fewer are sorted faster than files are looked for
_ARRAY_FROM = 20  # so many values of a permutation take longer one by one than as an array


class PackedWindows:
    """Sample i, for any i >= 0, is up to ``capacity`` tokens of pieces of documents; i // per_epoch is its epoch.

    ``fill`` is the part of all samples that is not padding; ``num_bytes`` is the memory that the order takes.

    Args:
        documents: (start, stop) of the documents to take, or their ascending numbers.
        capacity: tokens of a sample, at least 2.
        seed: the same on all ranks.
        cache: where the order of many documents is kept for all processes of this host; None: in each one's memory.

    Raises:
        DataError: no document has two tokens.
    """

    def __init__(
        self,
        token_file: TokenSource,
        *,
        documents: Documents,
        capacity: int,
        seed: int,
        cache: Cache | None = None,
    ) -> None:
        self.token_file, self.documents, self.capacity, self.seed = token_file, documents, capacity, seed
        if cache is None or count_of(documents) < _KEPT_FROM:
            self._pieces = Pieces(token_file.sizes, documents, capacity)
        else:
            self._pieces = Pieces(token_file.sizes, documents, capacity, self._keeper(cache))
        self.num_tokens = self._pieces.num_tokens
        counts = self._pieces.last_counts
        self._counts: list[int] = counts.tolist()
        groups = best_fit(counts, capacity)
        self._shares = [group.shares for group in groups]
        ends = np.cumsum([self._pieces.num_full, *(group.num_samples for group in groups)], dtype=np.int64)
        self._group_starts, self.per_epoch = ends, int(ends[-1])
        if self.per_epoch < 1:
            raise DataError(
                f"{token_file.prefix}: best-fit packing needs documents of at least two tokens, the split has none. "
                "Give more data."
            )
        packed = int(counts @ np.arange(capacity + 1)) + self._pieces.num_full * capacity
        self.fill = packed / (self.per_epoch * capacity)
        self.num_bytes = self._pieces.num_bytes

    def _keeper(self, cache: Cache) -> Keep:
        key = (_FORMAT, self.token_file.fingerprint, documents_key(self.documents), self.capacity)
        name = f"lengths-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
        return lambda kind, make: cache.array(f"{name}-{kind}", make)

    def pieces(self, index: int) -> list[Piece]:
        """Return the pieces of documents that sample ``index`` is made of, the longest first."""
        if index < 0:
            raise IndexError(f"samples count from 0, got {index}")
        epoch, place = divmod(int(index), self.per_epoch)
        place = Permutation(self.per_epoch, "samples", self.seed, epoch)(place)
        if place < self._pieces.num_full:
            return [Piece(*self._pieces.full(place), self.capacity)]
        group = int(np.searchsorted(self._group_starts, place, "right")) - 1
        return self._packed(self._shares[group], place - int(self._group_starts[group]), epoch)

    def _packed(self, shares: Sequence[Share], in_group: int, epoch: int) -> list[Piece]:
        """Return the pieces of one sample of a group."""
        places: list[int] = []
        lengths: list[int] = []
        for length, count, first in shares:
            first += in_group * count
            order = Permutation(self._counts[length], "pieces", self.seed, epoch, length)
            if count < _ARRAY_FROM:
                chosen = [order(number) for number in range(first, first + count)]
            else:
                chosen = order.array(np.arange(first, first + count)).tolist()
            start = self._pieces.starts[length]
            places += [start + place for place in chosen]
            lengths += [length] * count
        documents = self._pieces.by_length[places]
        offsets = sizes_of(self.token_file.sizes, documents) - np.array(lengths)
        return list(map(Piece, documents.tolist(), offsets.tolist(), lengths))

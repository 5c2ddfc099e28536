"""Best-fit packing of whole documents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron.data.cache import IndexCache
from megatron.data.documents import Documents, count_of, documents_key, number_type, sizes_of
from megatron.data.permutation import Permutation
from megatron.data.sample_index import Piece, TokenSource
from megatron.errors import DataError

# Best-fit-decreasing packing, done by counts: pieces of one length are interchangeable, and so are equal samples.
#
# Pieces are placed from the longest to the shortest, each in the open sample whose room it leaves smallest, or in a new
# one. Samples with the same pieces form a group, and a step places all pieces of one length that fit into one group.
# The number of steps therefore follows from the number of lengths: ten million documents take no longer than ten
# thousand.
#
# Source: Ding et al. 2024, "Fewer truncations improve language modeling", section 3 (arXiv 2404.10830).


class Share(NamedTuple):
    """What each sample of a group holds of one length: ``per_sample`` pieces.

    The pieces of a length are numbered from 0; the group's k-th sample holds ``first`` + k * ``per_sample`` and what
    follows.
    """

    length: int
    per_sample: int
    first: int


class Group(NamedTuple):
    """``num_samples`` samples alike, each with the pieces of ``shares``, the longest first."""

    num_samples: int
    shares: tuple[Share, ...] = ()

    def part(self, start: int, stop: int) -> Group:
        """Return samples ``start`` ... ``stop`` - 1 of this group."""
        return Group(
            stop - start, tuple(share._replace(first=share.first + start * share.per_sample) for share in self.shares)
        )

    def taking(self, share: Share) -> Group:
        """Return these samples with ``share`` in addition."""
        return Group(self.num_samples, (*self.shares, share))


class _Open:
    """Groups of open samples by their room."""

    def __init__(self) -> None:
        self.groups: dict[int, list[Group]] = {}
        self._rooms = 0  # bit r is set where a sample has room for r tokens

    def add(self, room: int, group: Group) -> None:
        if group.num_samples:
            self.groups.setdefault(room, []).append(group)
            self._rooms |= 1 << room

    def tightest(self, length: int) -> int | None:
        """Return the least room of at least ``length``."""
        rooms = self._rooms >> length
        return length + (rooms & -rooms).bit_length() - 1 if rooms else None

    def take(self, room: int) -> Group:
        group = self.groups[room].pop()
        if not self.groups[room]:
            del self.groups[room]
            self._rooms ^= 1 << room
        return group


def best_fit(counts: np.ndarray, capacity: int) -> list[Group]:
    """Return the samples that hold ``counts[length]`` pieces of each length, at most ``capacity`` tokens in each.

    Args:
        counts: int64[capacity + 1]; ``counts[0]`` is 0.
    """
    samples = _Open()
    for length in np.flatnonzero(counts)[::-1].tolist():
        first, stop = 0, int(counts[length])
        while first < stop:
            room = samples.tightest(length)
            group = Group(stop - first) if room is None else samples.take(room)
            first = _place(samples, group, capacity if room is None else room, length, first, stop)
    return [group for room in sorted(samples.groups) for group in samples.groups[room]]


def _place(samples: _Open, group: Group, room: int, length: int, first: int, stop: int) -> int:
    """Put pieces ``first`` ... ``stop`` - 1 into ``group``, as far as they fit; return the first that is left.

    A sample that took a piece has less room than those beside it, so it is filled up before the next is begun.
    """
    most, num = room // length, group.num_samples
    whole = min(num, (stop - first) // most)
    samples.add(room - most * length, group.part(0, whole).taking(Share(length, most, first)))
    first += whole * most
    left = stop - first
    if left and whole < num:
        samples.add(room - left * length, group.part(whole, whole + 1).taking(Share(length, left, first)))
        first, whole = stop, whole + 1
    if group.shares:  # what is left of new samples was never opened
        samples.add(room, group.part(whole, num))
    return first


# The pieces that documents are cut into for packing, in order of length.
#
# A sample of L inputs and L labels is L + 1 tokens. A document of at most that many is one piece. A longer one is cut
# every L tokens, and neighbouring pieces share one token: the last label of the one is the first input of the other. So
# each token of a document but its first is a label exactly once. Of a long document only the last piece is packed, for
# the others fill a sample each. A document of fewer than two tokens has no label and is left out.
#
# What is kept is one number a document, 4 bytes while it fits: the documents sorted by the length of their last piece
# (a counting sort, in blocks). It is the same for all epochs.

Keep = Callable[[str, Callable[[], np.ndarray]], np.ndarray]
"""Returns the array that the function makes, or the one kept under this name since another process made it."""

_BLOCK = 1 << 20


class Pieces:
    """Pieces of the documents of one split.

    ``last_counts`` int64[capacity + 1] says how many last pieces have each length; ``num_full`` counts the others. The
    documents whose last piece has n tokens are ``by_length[starts[n] : starts[n] + last_counts[n]]``.
    """

    def __init__(
        self, sizes: np.ndarray, documents: Documents, capacity: int, keep: Keep = lambda name, make: make()
    ) -> None:
        """Look at ``sizes``, those of all documents of the file, three times."""
        cut = _Cut(sizes, documents, capacity)
        self.step = capacity - 1
        *counts, self.num_tokens, num_long = keep("counts", cut.counts).tolist()
        self.last_counts = np.array(counts, np.int64)
        self.starts: list[int] = (self.last_counts.cumsum() - self.last_counts).tolist()
        self.by_length = keep("by-length", lambda: cut.sorted_by_length(np.array(counts)))
        long = keep("long", lambda: cut.long(num_long))
        self._long, self._full_ends = long[:num_long], long[num_long:]
        self.num_full = int(self._full_ends[-1]) if num_long else 0
        self.last_counts[:2] = 0

    def full(self, place: int) -> tuple[int, int]:
        """Return (document, offset) of a piece that fills a sample and is not the last of its document."""
        row = int(np.searchsorted(self._full_ends, place, "right"))
        before = int(self._full_ends[row - 1]) if row else 0
        return int(self._long[row]), (place - before) * self.step

    @property
    def num_bytes(self) -> int:
        """How much memory this takes."""
        return self.by_length.nbytes + self._long.nbytes + self._full_ends.nbytes


class _Cut:
    """Computes the arrays of ``Pieces``."""

    def __init__(self, sizes: np.ndarray, documents: Documents, capacity: int) -> None:
        self.sizes, self.documents, self.capacity = sizes, documents, capacity

    def counts(self) -> np.ndarray:
        """Return how many last pieces have 0, 1 ... capacity tokens, then the number of tokens, of long documents."""
        counts, num_tokens, num_long = np.zeros(self.capacity + 1, np.int64), 0, 0
        for _, sizes in self._blocks():
            counts += np.bincount(self._last(sizes), minlength=len(counts))
            num_tokens += int(sizes.sum())
            num_long += int((sizes > self.capacity).sum())
        return np.append(counts, [num_tokens, num_long])

    def sorted_by_length(self, counts: np.ndarray) -> np.ndarray:
        """Return the documents in the order of their last piece's length, those of one length in their own order."""
        result = np.empty(int(counts.sum()), number_type(self.documents))
        key_type = np.uint16 if self.capacity < 1 << 16 else np.uint32  # numpy sorts 16 bits by counting
        filled = np.cumsum(counts) - counts
        for numbers, sizes in self._blocks():
            lengths = self._last(sizes)
            order = np.argsort(lengths.astype(key_type), kind="stable")
            here = np.bincount(lengths, minlength=len(counts))
            shift = filled - (np.cumsum(here) - here)
            result[np.arange(len(order)) + np.repeat(shift, here)] = numbers[order]
            filled += here
        return result

    def long(self, num_long: int) -> np.ndarray:
        """Return int64[2 x num_long]: documents of more than one piece; the full pieces of each and all before it."""
        result, filled = np.empty((2, num_long), np.int64), 0
        for numbers, sizes in self._blocks():
            is_long = sizes > self.capacity
            stop = filled + int(is_long.sum())
            result[0, filled:stop], result[1, filled:stop] = numbers[is_long], self._num_full(sizes[is_long])
            filled = stop
        np.cumsum(result[1], out=result[1])
        return result.ravel()

    def _num_full(self, sizes: np.ndarray) -> np.ndarray:
        return np.maximum(sizes - 2, 0) // (self.capacity - 1)

    def _last(self, sizes: np.ndarray) -> np.ndarray:
        return sizes - self._num_full(sizes) * (self.capacity - 1)

    def _blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield document numbers and their sizes, both int64."""
        documents, sizes = self.documents, self.sizes
        start, stop = documents if isinstance(documents, tuple) else (0, len(documents))
        for first in range(start, stop, _BLOCK):
            last = min(first + _BLOCK, stop)
            if isinstance(documents, tuple):
                yield np.arange(first, last), sizes[first:last].astype(np.int64)
            else:
                yield documents[first:last].astype(np.int64), sizes_of(sizes, documents[first:last]).astype(np.int64)


# Samples of whole documents, packed best-fit: the counterpart of ``windows`` for ``--packing best-fit``.
#
# How many pieces of which length meet in a sample follows from the lengths alone and is worked out once. An epoch
# chooses which of the documents of a length takes which of its places, and then the order of the samples, by
# permutations that are computed from (seed, epoch). So an epoch stores nothing, and is the same in every process.

_FORMAT = 1
_KEPT_FROM = 1 << 22  # documents; fewer are sorted faster than files are looked for
_ARRAY_FROM = 20  # so many values of a permutation take longer one by one than as an array


class PackedSampleIndex:
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
        cache: IndexCache | None = None,
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

    def _keeper(self, cache: IndexCache) -> Keep:
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

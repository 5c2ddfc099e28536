"""Best-fit packing for complete documents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron.data.cache import IndexCache
from megatron.data.documents import Documents, count_documents, documents_key, gather_lengths, index_dtype
from megatron.data.permutation import Permutation
from megatron.data.sample_index import DocumentSlice, TokenSource
from megatron.errors import DataError

# Best-fit-decreasing packing by counts: slices with the same length are interchangeable, and so are equal samples.
#
# Slices are placed in descending length. Each is added to the open sample with the smallest sufficient room,
# or to a new sample. Samples with the same slices form a group, and one iteration places all slices of a length that
# fit into a group. The number of iterations therefore depends on the number of distinct lengths: ten million documents
# take no longer than ten thousand.
#
# Source: Ding et al. 2024, "Fewer truncations improve language modeling", section 3 (arXiv 2404.10830).


class Share(NamedTuple):
    """Slices with one length in a group's samples: each sample contains ``per_sample`` of them.

    Slices with the same length are numbered from 0. The group's k-th sample contains the slices from ``first`` +
    k * ``per_sample`` on.
    """

    length: int
    per_sample: int
    first: int


class Group(NamedTuple):
    """``num_samples`` samples with the same slice lengths ``shares``, in descending order."""

    num_samples: int
    shares: tuple[Share, ...] = ()

    def subrange(self, start: int, stop: int) -> Group:
        """Select samples ``start`` ... ``stop`` - 1 in this group."""
        return Group(
            stop - start, tuple(share._replace(first=share.first + start * share.per_sample) for share in self.shares)
        )

    def with_share(self, share: Share) -> Group:
        """Return a copy with ``share`` appended."""
        return Group(self.num_samples, (*self.shares, share))


class _OpenSamples:
    """Groups of open samples, by the tokens that still fit."""

    def __init__(self) -> None:
        self.groups: dict[int, list[Group]] = {}
        self._rooms = 0  # bit r is set where a sample has room for r tokens

    def add(self, room: int, group: Group) -> None:
        if group.num_samples:
            self.groups.setdefault(room, []).append(group)
            self._rooms |= 1 << room

    def smallest_room(self, length: int) -> int | None:
        """Find the smallest room for at least ``length`` tokens; None if there is none."""
        rooms = self._rooms >> length
        return length + (rooms & -rooms).bit_length() - 1 if rooms else None

    def pop(self, room: int) -> Group:
        group = self.groups[room].pop()
        if not self.groups[room]:
            del self.groups[room]
            self._rooms ^= 1 << room
        return group


def best_fit(counts: np.ndarray, capacity: int) -> list[Group]:
    """Pack slices into samples with at most ``capacity`` tokens, in groups.

    Args:
        counts: int64[capacity + 1], slice counts by length; ``counts[0]`` is 0.
    """
    open_samples = _OpenSamples()
    for length in np.flatnonzero(counts)[::-1].tolist():
        first, stop = 0, int(counts[length])
        while first < stop:
            room = open_samples.smallest_room(length)
            group = Group(stop - first) if room is None else open_samples.pop(room)
            first = _add_slices(open_samples, group, capacity if room is None else room, length, first, stop)
    return [group for room in sorted(open_samples.groups) for group in open_samples.groups[room]]


def _add_slices(samples: _OpenSamples, group: Group, room: int, length: int, first: int, stop: int) -> int:
    """Add as many slices out of ``first`` ... ``stop`` - 1 to ``group`` as fit; return the first remaining slice.

    A sample is filled before the next one is opened, because best fit prefers the sample with the smallest room.
    """
    per_sample, num_samples = room // length, group.num_samples
    filled = min(num_samples, (stop - first) // per_sample)
    samples.add(room - per_sample * length, group.subrange(0, filled).with_share(Share(length, per_sample, first)))
    first += filled * per_sample
    num_left = stop - first
    if num_left and filled < num_samples:
        samples.add(
            room - num_left * length, group.subrange(filled, filled + 1).with_share(Share(length, num_left, first))
        )
        first, filled = stop, filled + 1
    if group.shares:  # otherwise the group is new, and its unused samples are dropped
        samples.add(room, group.subrange(filled, num_samples))
    return first


# Document slices for packing, ordered by length.
#
# A sample with L inputs and L labels has L + 1 tokens. A document with at most L + 1 tokens is one slice. A longer
# document is split every L tokens, and neighbouring slices share one token: the last label of one slice is the first
# input of the next. Every token of a document except the first is therefore a label exactly once. Only the last slice
# of a long document needs to be packed, because each of the others fills a sample. Documents with fewer than two tokens
# have no label and are dropped.
#
# The stored index is a document list sorted by the length of the last slice (a counting sort, in blocks), with
# 4 bytes per document if the document indices fit. It is the same for all epochs.

CacheArray = Callable[[str, Callable[[], np.ndarray]], np.ndarray]
"""A function (name, build) that returns the cached array ``name``, or builds it."""

_BLOCK = 1 << 20


class SliceIndex:
    """Document slices in one split.

    Attributes:
        last_counts: int64[capacity + 1], the number of last slices with each length.
        num_full: count of all other slices; each fills a sample.
        by_length: documents sorted by the length of their last slice. The documents whose last slice has n tokens are
            ``by_length[starts[n] : starts[n] + last_counts[n]]``.
    """

    def __init__(
        self,
        document_lengths: np.ndarray,
        documents: Documents,
        capacity: int,
        cache_array: CacheArray = lambda name, make: make(),
    ) -> None:
        """Build the index in three passes over ``document_lengths``, the sizes of all documents in the file."""
        builder = _SliceIndexBuilder(document_lengths, documents, capacity)
        self.step = capacity - 1
        *counts, self.num_tokens, num_long = cache_array("counts", builder.count_last_slices).tolist()
        self.last_counts = np.array(counts, np.int64)
        self.starts: list[int] = (self.last_counts.cumsum() - self.last_counts).tolist()
        self.by_length = cache_array("by-length", lambda: builder.sort_by_length(np.array(counts)))
        long_arrays = cache_array("long", lambda: builder.find_long_documents(num_long))
        self._long_documents, self._full_ends = long_arrays[:num_long], long_arrays[num_long:]
        self.num_full = int(self._full_ends[-1]) if num_long else 0
        self.last_counts[:2] = 0

    def full_slice(self, slice_idx: int) -> tuple[int, int]:
        """Find (document, offset) for full slice ``slice_idx``; a document's last slice is not a full slice."""
        row = int(np.searchsorted(self._full_ends, slice_idx, "right"))
        num_before = int(self._full_ends[row - 1]) if row else 0
        return int(self._long_documents[row]), (slice_idx - num_before) * self.step

    def full_slices_of(self, document: int) -> range:
        """Find the full slices of ``document``."""
        row = int(np.searchsorted(self._long_documents, document))
        if row == len(self._long_documents) or self._long_documents[row] != document:
            return range(0)
        return range(int(self._full_ends[row - 1]) if row else 0, int(self._full_ends[row]))

    def last_slice_of(self, document: int, document_length: int) -> tuple[int, int] | None:
        """Find (length, index among the last slices of this length); None if the document has no last slice."""
        length = document_length - max(document_length - 2, 0) // self.step * self.step
        start, count = self.starts[length], int(self.last_counts[length])
        slot = int(np.searchsorted(self.by_length[start : start + count], document))
        is_found = slot < count and self.by_length[start + slot] == document
        return (length, slot) if is_found else None

    @property
    def num_bytes(self) -> int:
        """Index memory in bytes."""
        return self.by_length.nbytes + self._long_documents.nbytes + self._full_ends.nbytes


class _SliceIndexBuilder:
    """Computes the arrays for ``SliceIndex``."""

    def __init__(self, document_lengths: np.ndarray, documents: Documents, capacity: int) -> None:
        self.document_lengths, self.documents, self.capacity = document_lengths, documents, capacity

    def count_last_slices(self) -> np.ndarray:
        """Return int64[capacity + 3]: last slices with each length, all tokens, and long documents.

        A long document has several slices.
        """
        counts, num_tokens, num_long = np.zeros(self.capacity + 1, np.int64), 0, 0
        for _, document_lengths in self._blocks():
            counts += np.bincount(self._last_lengths(document_lengths), minlength=len(counts))
            num_tokens += int(document_lengths.sum())
            num_long += int((document_lengths > self.capacity).sum())
        return np.append(counts, [num_tokens, num_long])

    def sort_by_length(self, counts: np.ndarray) -> np.ndarray:
        """Sort the documents stably by the length of their last slice."""
        result = np.empty(int(counts.sum()), index_dtype(self.documents))
        key_type = np.uint16 if self.capacity < 1 << 16 else np.uint32  # numpy's stable sort of 16 bits is a radix sort
        filled = np.cumsum(counts) - counts
        for documents, document_lengths in self._blocks():
            lengths = self._last_lengths(document_lengths)
            order = np.argsort(lengths.astype(key_type), kind="stable")
            block_counts = np.bincount(lengths, minlength=len(counts))
            shift = filled - (np.cumsum(block_counts) - block_counts)
            result[np.arange(len(order)) + np.repeat(shift, block_counts)] = documents[order]
            filled += block_counts
        return result

    def find_long_documents(self, num_long: int) -> np.ndarray:
        """Return int64[2 x num_long]: documents with several slices, then their full slices' cumulative count."""
        result, filled = np.empty((2, num_long), np.int64), 0
        for documents, document_lengths in self._blocks():
            is_long = document_lengths > self.capacity
            stop = filled + int(is_long.sum())
            result[0, filled:stop], result[1, filled:stop] = (
                documents[is_long],
                self._num_full_slices(document_lengths[is_long]),
            )
            filled = stop
        np.cumsum(result[1], out=result[1])
        return result.ravel()

    def _num_full_slices(self, document_lengths: np.ndarray) -> np.ndarray:
        return np.maximum(document_lengths - 2, 0) // (self.capacity - 1)

    def _last_lengths(self, document_lengths: np.ndarray) -> np.ndarray:
        return document_lengths - self._num_full_slices(document_lengths) * (self.capacity - 1)

    def _blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield blocks (document indices, their sizes), both int64."""
        documents, document_lengths = self.documents, self.document_lengths
        start, stop = documents if isinstance(documents, tuple) else (0, len(documents))
        for first in range(start, stop, _BLOCK):
            last = min(first + _BLOCK, stop)
            if isinstance(documents, tuple):
                yield np.arange(first, last), document_lengths[first:last].astype(np.int64)
            else:
                yield (
                    documents[first:last].astype(np.int64),
                    gather_lengths(document_lengths, documents[first:last]).astype(np.int64),
                )


# Packed document samples: the counterpart of ``SampleIndex`` for ``--packing best-fit``.
#
# Each sample's slice lengths depend only on the document lengths and are computed once. Each epoch assigns the
# documents of each length to the slots of that length, and orders the samples, by permutations computed from (seed,
# epoch). An epoch therefore stores no data, and is the same in every process.

_FORMAT = 1
_CACHED_FROM_DOCUMENTS = 1 << 22  # documents; sorting fewer is faster than using the cache
_VECTORIZED_FROM = 20  # values; permuting fewer one by one is faster


class PackedSampleIndex:
    """Endless samples with document slices and up to ``capacity`` tokens; sample i belongs to epoch i // per_epoch.

    Attributes:
        fill: share of the sample tokens that are not padding.
        num_bytes: index memory in bytes.

    Args:
        documents: (start, stop) range of documents to use, or their ascending indices.
        capacity: tokens per sample, at least 2.
        seed: order seed; the same on all ranks.
        cache: shares large corpora's index between this host's processes; None: each process computes it in
            its own memory.

    Raises:
        DataError: no document has at least two tokens.
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
        if cache is None or count_documents(documents) < _CACHED_FROM_DOCUMENTS:
            self._slice_index = SliceIndex(token_file.document_lengths, documents, capacity)
        else:
            self._slice_index = SliceIndex(
                token_file.document_lengths, documents, capacity, self._make_cache_array(cache)
            )
        self.num_tokens = self._slice_index.num_tokens
        counts = self._slice_index.last_counts
        self._counts: list[int] = counts.tolist()
        groups = best_fit(counts, capacity)
        self._shares = [group.shares for group in groups]
        ends = np.cumsum([self._slice_index.num_full, *(group.num_samples for group in groups)], dtype=np.int64)
        self._group_starts, self.per_epoch = ends, int(ends[-1])
        if self.per_epoch < 1:
            raise DataError(
                f"{token_file.prefix}: best-fit packing needs documents of at least two tokens, but the split "
                "has none. Add more data."
            )
        num_packed_tokens = int(counts @ np.arange(capacity + 1)) + self._slice_index.num_full * capacity
        self.fill = num_packed_tokens / (self.per_epoch * capacity)
        self.num_bytes = self._slice_index.num_bytes

    def _make_cache_array(self, cache: IndexCache) -> CacheArray:
        """Build a ``CacheArray`` function that stores arrays in ``cache`` under a name unique to the documents."""
        key = (_FORMAT, self.token_file.fingerprint, documents_key(self.documents), self.capacity)
        name = f"lengths-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
        return lambda kind, make: cache.array(f"{name}-{kind}", make)

    def slices(self, index: int) -> list[DocumentSlice]:
        """Find the document slices in sample ``index``, the longest first."""
        if index < 0:
            raise IndexError(f"sample indices start at 0, got {index}")
        epoch, sample_idx = divmod(int(index), self.per_epoch)
        sample_idx = Permutation(self.per_epoch, "samples", self.seed, epoch)(sample_idx)
        if sample_idx < self._slice_index.num_full:
            return [DocumentSlice(*self._slice_index.full_slice(sample_idx), self.capacity)]
        group_idx = int(np.searchsorted(self._group_starts, sample_idx, "right")) - 1
        return self._packed_slices(self._shares[group_idx], sample_idx - int(self._group_starts[group_idx]), epoch)

    def samples_of(self, document: int, first: int, stop: int) -> list[int]:
        """Find the samples from ``first`` to ``stop`` - 1 with tokens of ``document``, in ascending order."""
        indices: list[int] = []
        last_slice = self._slice_index.last_slice_of(document, int(self.token_file.document_lengths[document]))
        for epoch in range(first // self.per_epoch, -(-stop // self.per_epoch)):
            samples = list(self._slice_index.full_slices_of(document))
            if last_slice is not None:
                length, slot = last_slice
                slice_idx = Permutation(self._counts[length], "pieces", self.seed, epoch, length).inverse(slot)
                samples.append(self._sample_with(length, slice_idx))
            permutation = Permutation(self.per_epoch, "samples", self.seed, epoch)
            indices += [epoch * self.per_epoch + permutation.inverse(sample_idx) for sample_idx in samples]
        return sorted(index for index in indices if first <= index < stop)

    def _sample_with(self, length: int, slice_idx: int) -> int:
        """Find the sample, before the permutation, with slice ``slice_idx`` of those with ``length`` tokens."""
        for group_idx, shares in enumerate(self._shares):
            start, stop = self._group_starts[group_idx : group_idx + 2].tolist()
            for share in shares:
                if share.length == length and 0 <= slice_idx - share.first < share.per_sample * (stop - start):
                    return int(start) + (slice_idx - share.first) // share.per_sample
        raise IndexError(f"no sample has slice {slice_idx} of {length} tokens")

    def _packed_slices(self, shares: Sequence[Share], idx_in_group: int, epoch: int) -> list[DocumentSlice]:
        """Find the document slices in sample ``idx_in_group`` of the group with slice lengths ``shares``."""
        rows: list[int] = []
        lengths: list[int] = []
        for length, count, first in shares:
            first += idx_in_group * count
            order = Permutation(self._counts[length], "pieces", self.seed, epoch, length)
            if count < _VECTORIZED_FROM:
                slots = [order(idx) for idx in range(first, first + count)]
            else:
                slots = order.array(np.arange(first, first + count)).tolist()
            start = self._slice_index.starts[length]
            rows += [start + slot for slot in slots]
            lengths += [length] * count
        documents = self._slice_index.by_length[rows]
        offsets = gather_lengths(self.token_file.document_lengths, documents) - np.array(lengths)
        return list(map(DocumentSlice, documents.tolist(), offsets.tolist(), lengths))

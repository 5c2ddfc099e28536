"""Best-fit packing: the plan against a plain loop, and what an epoch of samples must hold."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import packing
from megatron.data.cache import IndexCache
from megatron.data.documents import Documents
from megatron.data.packing import PackedSampleIndex, SliceIndex, best_fit
from megatron.errors import DataError


class FakeDocuments:
    """A token source that has nothing but sizes."""

    prefix, fingerprint = "fake", "fake"

    def __init__(self, sizes: list[int]) -> None:
        self.document_lengths = np.array(sizes, np.int32)

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        raise NotImplementedError


def reference_free_space(lengths: list[int], capacity: int) -> list[int]:
    """The room left in each sample by best-fit-decreasing, written out."""
    free_spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        free_space = min((free_space for free_space in free_spaces if free_space >= length), default=None)
        if free_space is None:
            free_space = capacity
        else:
            free_spaces.remove(free_space)
        free_spaces.append(free_space - length)
    return sorted(free_spaces)


def documents_by_last_length(chunks: SliceIndex) -> list[np.ndarray]:
    """Return the documents whose last slice has 0, 1, ... tokens."""
    spans = zip(chunks.starts, chunks.last_counts.tolist(), strict=True)
    return [chunks.by_length[start : start + num_documents] for start, num_documents in spans]


def count_labels(windows: PackedSampleIndex, epoch: int) -> Counter[tuple[int, int]]:
    """Count how often each token, as (document, place), is a label in an epoch."""
    counts: Counter[tuple[int, int]] = Counter()
    for index in range(epoch * windows.per_epoch, (epoch + 1) * windows.per_epoch):
        slices = windows.slices(index)
        assert sum(document_slice.length for document_slice in slices) <= windows.capacity and all(
            document_slice.length > 1 for document_slice in slices
        )
        for document, offset, length in slices:
            counts.update((document, position) for position in range(offset + 1, offset + length))
    return counts


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 40))
def test_plan_is_best_fit_decreasing_and_contains_each_chunk_once(data: st.DataObject, capacity: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    counts = np.bincount(np.array(lengths, np.int64), minlength=capacity + 1)
    free_spaces, chunk_counts = [], Counter[tuple[int, int]]()
    for group in best_fit(counts, capacity):
        free_spaces += [capacity - sum(share.length * share.per_sample for share in group.shares)] * group.num_samples
        for length, per_sample, first in group.shares:
            chunk_counts.update((length, first + idx) for idx in range(per_sample * group.num_samples))
    assert sorted(free_spaces) == reference_free_space(lengths, capacity)
    assert chunk_counts == Counter(
        (length, idx) for length, count in enumerate(counts.tolist()) for idx in range(count)
    )


def test_plan_size_is_independent_of_document_count() -> None:
    counts = np.zeros(1026, np.int64)
    counts[[1025, 700, 300, 25, 7]] = np.array([1, 5, 7, 9, 11]) * 10**12 + 3
    groups = best_fit(counts, 1025)
    assert len(groups) < 20
    num_packed = sum(group.num_samples * share.per_sample for group in groups for share in group.shares)
    assert num_packed == 33 * 10**12 + 15


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(2, 48), st.integers(0, 2**31))
def test_each_token_except_first_of_document_is_label_once_per_epoch(
    data: st.DataObject, capacity: int, seed: int
) -> None:
    length = st.sampled_from([0, 1, 2, 3, capacity - 1, capacity, capacity + 1, 2 * capacity - 1, 5 * capacity])
    lengths = data.draw(st.lists(length, min_size=3, max_size=40))
    form = data.draw(st.sampled_from(["range", "numbers"]))
    documents: Documents = (1, len(lengths)) if form == "range" else np.arange(0, len(lengths), 2, dtype=np.int32)
    document_ids = range(1, len(lengths)) if isinstance(documents, tuple) else documents.tolist()
    expected = Counter((document, position) for document in document_ids for position in range(1, lengths[document]))
    if not expected:
        with pytest.raises(DataError, match="documents of at least two tokens"):
            PackedSampleIndex(FakeDocuments(lengths), documents=documents, capacity=capacity, seed=seed)
        return
    windows = PackedSampleIndex(FakeDocuments(lengths), documents=documents, capacity=capacity, seed=seed)
    assert count_labels(windows, 0) == count_labels(windows, 3) == expected
    assert windows.num_tokens == sum(lengths[document] for document in document_ids)
    num_held_tokens = sum(
        document_slice.length for idx in range(windows.per_epoch) for document_slice in windows.slices(idx)
    )
    assert windows.fill == pytest.approx(num_held_tokens / (windows.per_epoch * capacity), rel=1e-12)


def test_chunks_are_independent_of_sort_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(5).integers(0, 60, 200).astype(np.int32)
    document_sets: tuple[Documents, ...] = ((3, 197), np.flatnonzero(lengths % 3))
    for documents in document_sets:
        unblocked = SliceIndex(lengths, documents, 17)
        with monkeypatch.context() as patch:
            patch.setattr(packing, "_BLOCK", 7)
            blocked = SliceIndex(lengths, documents, 17)
        assert pickle.dumps(unblocked) == pickle.dumps(blocked)
        order = np.concatenate(documents_by_last_length(unblocked))
        document_ids = range(*documents) if isinstance(documents, tuple) else documents.tolist()
        last_lengths = {
            document: lengths[document] - max(lengths[document] - 2, 0) // 16 * 16 for document in document_ids
        }
        assert order.tolist() == sorted(
            (document for document in document_ids if last_lengths[document] > 1),
            key=lambda document: (last_lengths[document], document),
        )
        assert unblocked.num_full == sum(max(int(lengths[document]) - 2, 0) // 16 for document in document_ids)


def test_processes_of_host_share_cached_document_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_CACHED_FROM_DOCUMENTS", 100)
    source = FakeDocuments(np.random.default_rng(5).integers(0, 60, 120).tolist())

    def packed_slices(capacity: int = 17, documents: Documents = (0, 120), is_cached: bool = True) -> list[Any]:
        cache = IndexCache(tmp_path) if is_cached else None
        windows = PackedSampleIndex(source, documents=documents, capacity=capacity, seed=3, cache=cache)
        return [windows.slices(index) for index in range(windows.per_epoch)]

    uncached, narrower_uncached = packed_slices(is_cached=False), packed_slices(documents=(0, 119), is_cached=False)
    assert packed_slices() == uncached and packed_slices(documents=(0, 119)) == narrower_uncached
    with monkeypatch.context() as patch:
        patch.setattr(packing._SliceIndexBuilder, "_blocks", lambda cut: iter(()))
        assert packed_slices() == uncached and packed_slices(documents=(0, 119)) == narrower_uncached, (
            "nothing is computed again"
        )
        with pytest.raises(DataError, match="the split has none"):
            packed_slices(capacity=18)


def test_lengths_and_positions_beyond_16_and_31_bits_are_correct() -> None:
    windows = PackedSampleIndex(FakeDocuments([65_540, 4, 70_001, 200_000]), documents=(0, 4), capacity=70_001, seed=1)
    assert windows.per_epoch == 5
    assert sorted(sorted(windows.slices(idx)) for idx in range(5)) == [
        [(0, 0, 65_540), (1, 0, 4)],
        [(2, 0, 70_001)],
        [(3, 0, 70_001)],
        [(3, 70_000, 70_001)],
        [(3, 140_000, 60_000)],
    ]


def test_document_ids_beyond_31_bits_are_correct() -> None:
    first, lengths = 2**31 - 2, np.array([4, 30, 5, 3, 8], np.int32)

    class OffsetLengths:
        flags = lengths.flags

        def take(self, numbers: np.ndarray) -> np.ndarray:
            return lengths[numbers - first]

        def __getitem__(self, chosen: slice) -> np.ndarray:
            return lengths[chosen.start - first : chosen.stop - first]

    document_sets: tuple[Documents, ...] = ((first, first + 5), first + np.arange(5))
    for documents in document_sets:
        chunks = SliceIndex(OffsetLengths(), documents, 9)  # type: ignore[arg-type]
        assert [document_ids.tolist() for document_ids in documents_by_last_length(chunks)][3:9] == [
            [first + 3],
            [first],
            [first + 2],
            [first + 1],
            [],
            [first + 4],
        ]
        assert [chunks.full_slice(chunk_idx) for chunk_idx in range(chunks.num_full)] == [
            (first + 1, 8 * idx) for idx in range(3)
        ]


def test_epochs_group_documents_differently_and_processes_agree() -> None:
    source = FakeDocuments(np.random.default_rng(7).integers(2, 30, 400).tolist())
    windows = PackedSampleIndex(source, documents=(0, 400), capacity=33, seed=11)
    copied = pickle.loads(pickle.dumps(PackedSampleIndex(source, documents=(0, 400), capacity=33, seed=11)))
    epochs = []
    for epoch in range(2):
        indices = range(epoch * windows.per_epoch, (epoch + 1) * windows.per_epoch)
        samples = [windows.slices(index) for index in indices]
        assert samples == [copied.slices(index) for index in reversed(indices)][::-1]
        epochs.append([frozenset(document_slice.document for document_slice in sample) for sample in samples])
    common = set(epochs[0]) & set(epochs[1])
    assert len(common) < 0.1 * windows.per_epoch and windows.fill > 0.97
    assert [len(sample) for sample in epochs[0]] != [len(sample) for sample in epochs[1]], "samples are permuted"
    with pytest.raises(IndexError, match="start at 0"):
        windows.slices(-1)


def test_packing_order_is_stable() -> None:
    windows = PackedSampleIndex(
        FakeDocuments([5, 9, 2, 30, 4, 4, 7, 1, 6, 9]), documents=(0, 10), capacity=9, seed=1234
    )
    assert windows.per_epoch == 10
    assert [[tuple(document_slice) for document_slice in windows.slices(idx)] for idx in (0, 4, 8, 9, 100)] == EXPECTED


EXPECTED = [[(6, 0, 7), (2, 0, 2)], [(1, 0, 9)], [(3, 8, 9)], [(3, 24, 6)], [(6, 0, 7), (2, 0, 2)]]

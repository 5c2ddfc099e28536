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
from megatron.data.packing import PackedSampleIndex, Pieces, best_fit
from megatron.errors import DataError


class Sizes:
    """A token source that has nothing but sizes."""

    prefix, fingerprint = "fake", "fake"

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = np.array(sizes, np.int32)

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        raise NotImplementedError


def reference(lengths: list[int], capacity: int) -> list[int]:
    """The room left in each sample by best-fit-decreasing, written out."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        room = min((room for room in rooms if room >= length), default=None)
        if room is None:
            room = capacity
        else:
            rooms.remove(room)
        rooms.append(room - length)
    return sorted(rooms)


def by_length(pieces: Pieces) -> list[np.ndarray]:
    """Return the documents whose last piece has 0, 1, ... tokens."""
    rows = zip(pieces.starts, pieces.last_counts.tolist(), strict=True)
    return [pieces.by_length[start : start + count] for start, count in rows]


def labels_of(windows: PackedSampleIndex, epoch: int) -> Counter[tuple[int, int]]:
    """Count how often each token, as (document, place), is a label in an epoch."""
    seen: Counter[tuple[int, int]] = Counter()
    for index in range(epoch * windows.per_epoch, (epoch + 1) * windows.per_epoch):
        pieces = windows.pieces(index)
        assert sum(piece.length for piece in pieces) <= windows.capacity and all(piece.length > 1 for piece in pieces)
        for document, offset, length in pieces:
            seen.update((document, place) for place in range(offset + 1, offset + length))
    return seen


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 40))
def test_the_plan_is_best_fit_decreasing_and_holds_each_piece_once(data: st.DataObject, capacity: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    counts = np.bincount(np.array(lengths, np.int64), minlength=capacity + 1)
    rooms, numbers = [], Counter[tuple[int, int]]()
    for group in best_fit(counts, capacity):
        rooms += [capacity - sum(share.length * share.per_sample for share in group.shares)] * group.num_samples
        for length, per_sample, first in group.shares:
            numbers.update((length, first + i) for i in range(per_sample * group.num_samples))
    assert sorted(rooms) == reference(lengths, capacity)
    assert numbers == Counter((length, i) for length, count in enumerate(counts.tolist()) for i in range(count))


def test_the_plan_takes_no_step_for_each_document() -> None:
    counts = np.zeros(1026, np.int64)
    counts[[1025, 700, 300, 25, 7]] = np.array([1, 5, 7, 9, 11]) * 10**12 + 3
    groups = best_fit(counts, 1025)
    assert len(groups) < 20
    packed = sum(group.num_samples * share.per_sample for group in groups for share in group.shares)
    assert packed == 33 * 10**12 + 15


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(2, 48), st.integers(0, 2**31))
def test_each_token_but_a_document_s_first_is_a_label_once_an_epoch(
    data: st.DataObject, capacity: int, seed: int
) -> None:
    size = st.sampled_from([0, 1, 2, 3, capacity - 1, capacity, capacity + 1, 2 * capacity - 1, 5 * capacity])
    sizes = data.draw(st.lists(size, min_size=3, max_size=40))
    chosen = data.draw(st.sampled_from(["range", "numbers"]))
    documents: Documents = (1, len(sizes)) if chosen == "range" else np.arange(0, len(sizes), 2, dtype=np.int32)
    numbers = range(1, len(sizes)) if isinstance(documents, tuple) else documents.tolist()
    expected = Counter((document, place) for document in numbers for place in range(1, sizes[document]))
    if not expected:
        with pytest.raises(DataError, match="documents of at least two tokens"):
            PackedSampleIndex(Sizes(sizes), documents=documents, capacity=capacity, seed=seed)
        return
    windows = PackedSampleIndex(Sizes(sizes), documents=documents, capacity=capacity, seed=seed)
    assert labels_of(windows, 0) == labels_of(windows, 3) == expected
    assert windows.num_tokens == sum(sizes[document] for document in numbers)
    held = sum(piece.length for i in range(windows.per_epoch) for piece in windows.pieces(i))
    assert windows.fill == pytest.approx(held / (windows.per_epoch * capacity), rel=1e-12)


def test_pieces_do_not_depend_on_the_blocks_they_are_sorted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = np.random.default_rng(5).integers(0, 60, 200).astype(np.int32)
    kinds: tuple[Documents, ...] = ((3, 197), np.flatnonzero(sizes % 3))
    for documents in kinds:
        whole = Pieces(sizes, documents, 17)
        with monkeypatch.context() as patch:
            patch.setattr(packing, "_BLOCK", 7)
            blocks = Pieces(sizes, documents, 17)
        assert pickle.dumps(whole) == pickle.dumps(blocks)
        order = np.concatenate(by_length(whole))
        numbers = range(*documents) if isinstance(documents, tuple) else documents.tolist()
        last = {d: sizes[d] - max(sizes[d] - 2, 0) // 16 * 16 for d in numbers}
        assert order.tolist() == sorted((d for d in numbers if last[d] > 1), key=lambda d: (last[d], d))
        assert whole.num_full == sum(max(int(sizes[d]) - 2, 0) // 16 for d in numbers)


def test_processes_of_a_host_share_the_order_of_many_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_KEPT_FROM", 100)
    source = Sizes(np.random.default_rng(5).integers(0, 60, 120).tolist())

    def order(capacity: int = 17, documents: Documents = (0, 120), is_kept: bool = True) -> list[Any]:
        cache = IndexCache(tmp_path) if is_kept else None
        windows = PackedSampleIndex(source, documents=documents, capacity=capacity, seed=3, cache=cache)
        return [windows.pieces(index) for index in range(windows.per_epoch)]

    alone, narrower = order(is_kept=False), order(documents=(0, 119), is_kept=False)
    assert order() == alone and order(documents=(0, 119)) == narrower
    with monkeypatch.context() as patch:
        patch.setattr(packing._Cut, "_blocks", lambda cut: iter(()))
        assert order() == alone and order(documents=(0, 119)) == narrower, "nothing is computed again"
        with pytest.raises(DataError, match="the split has none"):
            order(capacity=18)


def test_lengths_and_documents_beyond_16_and_31_bits_are_right() -> None:
    windows = PackedSampleIndex(Sizes([65_540, 4, 70_001, 200_000]), documents=(0, 4), capacity=70_001, seed=1)
    assert windows.per_epoch == 5
    assert sorted(sorted(windows.pieces(i)) for i in range(5)) == [
        [(0, 0, 65_540), (1, 0, 4)],
        [(2, 0, 70_001)],
        [(3, 0, 70_001)],
        [(3, 70_000, 70_001)],
        [(3, 140_000, 60_000)],
    ]


def test_document_numbers_beyond_31_bits_are_right() -> None:
    first, sizes = 2**31 - 2, np.array([4, 30, 5, 3, 8], np.int32)

    class Far:
        flags = sizes.flags

        def take(self, numbers: np.ndarray) -> np.ndarray:
            return sizes[numbers - first]

        def __getitem__(self, chosen: slice) -> np.ndarray:
            return sizes[chosen.start - first : chosen.stop - first]

    kinds: tuple[Documents, ...] = ((first, first + 5), first + np.arange(5))
    for documents in kinds:
        pieces = Pieces(Far(), documents, 9)  # type: ignore[arg-type]
        assert [found.tolist() for found in by_length(pieces)][3:9] == [
            [first + 3],
            [first],
            [first + 2],
            [first + 1],
            [],
            [first + 4],
        ]
        assert [pieces.full(place) for place in range(pieces.num_full)] == [(first + 1, 8 * i) for i in range(3)]


def test_epochs_differ_in_which_documents_meet_and_processes_agree() -> None:
    source = Sizes(np.random.default_rng(7).integers(2, 30, 400).tolist())
    windows = PackedSampleIndex(source, documents=(0, 400), capacity=33, seed=11)
    other = pickle.loads(pickle.dumps(PackedSampleIndex(source, documents=(0, 400), capacity=33, seed=11)))
    epochs = []
    for epoch in range(2):
        indices = range(epoch * windows.per_epoch, (epoch + 1) * windows.per_epoch)
        samples = [windows.pieces(index) for index in indices]
        assert samples == [other.pieces(index) for index in reversed(indices)][::-1]
        epochs.append([frozenset(piece.document for piece in sample) for sample in samples])
    common = set(epochs[0]) & set(epochs[1])
    assert len(common) < 0.1 * windows.per_epoch and windows.fill > 0.97
    assert [len(sample) for sample in epochs[0]] != [len(sample) for sample in epochs[1]], "samples are permuted"
    with pytest.raises(IndexError, match="start at 0"):
        windows.pieces(-1)


def test_the_order_is_the_same_for_ever() -> None:
    windows = PackedSampleIndex(Sizes([5, 9, 2, 30, 4, 4, 7, 1, 6, 9]), documents=(0, 10), capacity=9, seed=1234)
    assert windows.per_epoch == 10
    assert [[tuple(piece) for piece in windows.pieces(i)] for i in (0, 4, 8, 9, 100)] == FIXED


FIXED = [[(6, 0, 7), (2, 0, 2)], [(1, 0, 9)], [(3, 8, 9)], [(3, 24, 6)], [(6, 0, 7), (2, 0, 2)]]

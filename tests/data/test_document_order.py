from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import cache as data_cache
from megatron.data import sample_index
from megatron.data.cache import IndexCache
from megatron.data.documents import Documents, count_tokens, documents_key, gather_lengths, index_dtype
from megatron.data.permutation import Permutation
from megatron.data.sample_index import DocumentIndex, SampleIndex


class FakeDocuments:
    """Documents that are sizes alone; a token is its place in the file."""

    def __init__(self, lengths: list[int] | np.ndarray, fingerprint: str = "sizes") -> None:
        self.prefix, self.document_lengths, self.fingerprint = "sizes", np.asarray(lengths), fingerprint
        self.starts = np.concatenate([[0], np.cumsum(self.document_lengths, dtype=np.int64)])

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        assert length is not None and 0 < length <= self.document_lengths[document] - offset
        return self.starts[document] + offset + np.arange(length)


def reference_tokens(source: FakeDocuments, documents: Documents, seed: int, epoch: int) -> np.ndarray:
    """All tokens in the order of an epoch, written out."""
    document_ids = np.arange(*documents) if isinstance(documents, tuple) else documents
    order = Permutation(len(document_ids), "documents", seed, epoch)
    segments = [
        np.arange(*source.starts[[document_ids[order(position)], document_ids[order(position)] + 1]])
        for position in range(len(document_ids))
    ]
    return np.concatenate(segments)


def unaligned(lengths: np.ndarray) -> np.ndarray:
    view = np.ndarray(len(lengths), np.int32, bytearray(2 + lengths.nbytes), 2)
    view[:] = lengths
    return view


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_slices_of_any_range_match_reference_order(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.sampled_from([0, 0, 1, 2, 9]), min_size=15, max_size=40))
    source = FakeDocuments(unaligned(np.array(lengths, np.int32)))
    excluded = data.draw(st.sets(st.integers(0, len(lengths) - 1), max_size=10))
    document_ids = np.array(sorted(set(range(len(lengths))) - excluded), np.int32)
    documents = data.draw(st.sampled_from([(len(excluded), len(lengths)), document_ids]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_index, "SEGMENT", 12)
        patch.setattr(sample_index, "_STRIDE", 4)
        patch.setattr(sample_index, "_BLOCK", 8)
        order = DocumentIndex(source, documents, seed=5, epoch=2)
        if not count_tokens(source.document_lengths, documents):
            return
        tokens = reference_tokens(source, documents, 5, 2)
        for _ in range(5):
            start = data.draw(st.integers(0, len(tokens) - 1))
            end = data.draw(st.integers(start + 1, len(tokens)))
            slices = order.slices(start, end)
            assert all(document_slice.length > 0 for document_slice in slices)
            slice_tokens = [
                source.starts[document] + offset + token_idx
                for document, offset, length in slices
                for token_idx in range(length)
            ]
            assert slice_tokens == tokens[start:end].tolist()


def make_windows(
    source: FakeDocuments, cache: IndexCache | None, seed: int = 3, documents: Documents = (2, 990)
) -> SampleIndex:
    return SampleIndex(
        source, documents=documents, length=50, overlap=1, seed=seed, length_flag="--seq-length 50", cache=cache
    )


def test_cached_order_equals_in_memory_order_and_old_epochs_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = np.random.default_rng(0).integers(0, 30, 1000).astype(np.int32)
    in_memory = make_windows(FakeDocuments(lengths), None)
    monkeypatch.setattr(sample_index, "SEGMENT", 256)
    source, cache = FakeDocuments(lengths), IndexCache(tmp_path)
    cached, per_epoch = make_windows(source, cache), in_memory.per_epoch
    for epoch in range(4):
        for index in range(epoch * per_epoch, (epoch + 1) * per_epoch, 7):
            assert np.array_equal(cached[index], in_memory[index])
        assert len(list(cache.folder.iterdir())) == 4 * min(epoch + 1, 2)
    monkeypatch.setattr(DocumentIndex, "_build", None)  # what is there is not built
    assert np.array_equal(make_windows(source, cache)[3 * per_epoch], in_memory[3 * per_epoch])


def test_flipped_bit_in_cache_does_not_change_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(1).integers(0, 30, 1000).astype(np.int32)
    in_memory = make_windows(FakeDocuments(lengths), None)
    monkeypatch.setattr(sample_index, "SEGMENT", 256)
    cache = IndexCache(tmp_path)
    make_windows(FakeDocuments(lengths), cache)[0]
    rng = random.Random(2)
    for turn_idx in range(20):
        path = sorted(cache.folder.iterdir())[turn_idx % 4]
        stat, data = path.stat(), bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        monkeypatch.setattr(data_cache, "_PROCESS_START_NS", time.time_ns())  # another job
        samples = make_windows(FakeDocuments(lengths), cache)
        for index in range(0, in_memory.per_epoch, 5):
            assert np.array_equal(samples[index], in_memory[index]), (turn_idx, index)


@pytest.mark.parametrize("changed", ["data", "documents", "numbers", "seed", "format", "epoch"])
def test_stale_cache_entries_are_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    """Row D16."""
    monkeypatch.setattr(sample_index, "SEGMENT", 100)
    lengths, cache, document_ids = np.full(400, 20, np.int32), IndexCache(tmp_path), np.arange(0, 400, 2)
    make_windows(FakeDocuments(lengths), cache, documents=(0, 300))[0]
    make_windows(FakeDocuments(lengths), cache, documents=document_ids)[0]
    source, documents, seed, index = FakeDocuments(lengths), (0, 300), 3, 0
    if changed == "data":
        source = FakeDocuments(lengths + 1, "other")
    elif changed == "documents":
        documents = (1, 301)
    elif changed == "numbers":
        documents = document_ids + 1  # type: ignore[assignment]
    elif changed == "seed":
        seed = 4
    elif changed == "format":
        monkeypatch.setattr(sample_index, "FORMAT", 2)
    else:
        index = 10**6
    built_segments: list[int] = []
    build = DocumentIndex._build
    monkeypatch.setattr(
        DocumentIndex,
        "_build",
        lambda order, segment_idx: built_segments.append(segment_idx) or build(order, segment_idx),
    )
    sample = make_windows(source, cache, seed, documents)[index]
    assert built_segments and np.array_equal(sample, make_windows(source, None, seed, documents)[index])


def test_token_positions_beyond_2_31_and_2_40_are_correct() -> None:
    """Row D13: sizes alone; places are those of Python's unbounded numbers."""
    for length in (2**30, 2**40):
        source = FakeDocuments(np.full(300, length, np.int64))
        order, permutation = DocumentIndex(source, (0, 300), seed=1, epoch=0), Permutation(300, "documents", 1, 0)
        for position in (0, 1, 63, 64, 200, 299):
            start = position * length + 5
            assert order.slices(start, start + 3) == [(permutation(position), 5, 3)]
        assert count_tokens(source.document_lengths, (0, 300)) == 300 * length
        assert count_tokens(source.document_lengths, np.arange(300)) == 300 * length


def test_document_ids_use_int32_when_they_fit() -> None:
    assert index_dtype((0, 2**31)) is np.int32 and index_dtype((5, 2**31 + 1)) is np.int64
    assert index_dtype(np.array([1, 2**31 - 1])) is np.int32 and index_dtype(np.array([1, 2**31])) is np.int64
    assert DocumentIndex(FakeDocuments([3]), (0, 1), seed=1, epoch=0)._segments[0].document_indices.dtype == np.int32


def test_lengths_are_read_from_unaligned_memory_without_full_copy() -> None:
    lengths = unaligned(np.arange(1000, dtype=np.int32))
    assert not lengths.flags.aligned
    assert gather_lengths(lengths, np.array([999, 0, 5], np.int32)).tolist() == [999, 0, 5]


def test_documents_key_is_stable() -> None:
    """Fingerprints in checkpoints hold it."""
    assert documents_key((1, 6)) == "(1, 6)"
    assert documents_key(np.array([1, 2, 5], np.int32)) == documents_key(np.array([1, 2, 5])) == KEY
    assert documents_key(np.array([1, 2, 6])) != KEY


KEY = "3 documents 453d878e3ed0a553"


def test_error_describes_range_or_hash_split_documents() -> None:
    for documents, text in (
        ((2, 4), "documents 2:4 have 2 tokens"),
        (np.array([1, 2, 4]), "3 documents of a split by hash"),
    ):
        with pytest.raises(ValueError, match=text):
            make_windows(FakeDocuments(np.ones(9, np.int32)), None, documents=documents)

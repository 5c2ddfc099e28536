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
from megatron.data.documents import Documents, documents_key, num_tokens_of, number_type, sizes_of
from megatron.data.permutation import Permutation
from megatron.data.sample_index import DocumentIndex, SampleIndex


class Sizes:
    """Documents that are sizes alone; a token is its place in the file."""

    def __init__(self, sizes: list[int] | np.ndarray, fingerprint: str = "sizes") -> None:
        self.prefix, self.sizes, self.fingerprint = "sizes", np.asarray(sizes), fingerprint
        self.starts = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        assert length is not None and 0 < length <= self.sizes[document] - offset
        return self.starts[document] + offset + np.arange(length)


def laid_out(source: Sizes, documents: Documents, seed: int, epoch: int) -> np.ndarray:
    """All tokens in the order of an epoch, written out."""
    numbers = np.arange(*documents) if isinstance(documents, tuple) else documents
    order = Permutation(len(numbers), "documents", seed, epoch)
    parts = [np.arange(*source.starts[[numbers[order(k)], numbers[order(k)] + 1]]) for k in range(len(numbers))]
    return np.concatenate(parts)


def unaligned(sizes: np.ndarray) -> np.ndarray:
    view = np.ndarray(len(sizes), np.int32, bytearray(2 + sizes.nbytes), 2)
    view[:] = sizes
    return view


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_pieces_of_any_stretch_equal_the_order_written_out(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.sampled_from([0, 0, 1, 2, 9]), min_size=15, max_size=40))
    source = Sizes(unaligned(np.array(sizes, np.int32)))
    left_out = data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=10))
    chosen = np.array(sorted(set(range(len(sizes))) - left_out), np.int32)
    documents = data.draw(st.sampled_from([(len(left_out), len(sizes)), chosen]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_index, "SEGMENT", 12)
        patch.setattr(sample_index, "_STRIDE", 4)
        patch.setattr(sample_index, "_BLOCK", 8)
        order = DocumentIndex(source, documents, seed=5, epoch=2)
        if not num_tokens_of(source.sizes, documents):
            return
        tokens = laid_out(source, documents, 5, 2)
        for _ in range(5):
            start = data.draw(st.integers(0, len(tokens) - 1))
            end = data.draw(st.integers(start + 1, len(tokens)))
            pieces = order.pieces(start, end)
            assert all(piece.length > 0 for piece in pieces)
            found = [source.starts[d] + offset + k for d, offset, length in pieces for k in range(length)]
            assert found == tokens[start:end].tolist()


def windows(source: Sizes, cache: IndexCache | None, seed: int = 3, documents: Documents = (2, 990)) -> SampleIndex:
    return SampleIndex(
        source, documents=documents, length=50, overlap=1, seed=seed, asked_by="--seq-length 50", cache=cache
    )


def test_an_order_kept_in_files_is_that_of_memory_and_old_epochs_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = np.random.default_rng(0).integers(0, 30, 1000).astype(np.int32)
    in_memory = windows(Sizes(sizes), None)
    monkeypatch.setattr(sample_index, "SEGMENT", 256)
    source, cache = Sizes(sizes), IndexCache(tmp_path)
    shared, per_epoch = windows(source, cache), in_memory.per_epoch
    for epoch in range(4):
        for index in range(epoch * per_epoch, (epoch + 1) * per_epoch, 7):
            assert np.array_equal(shared[index], in_memory[index])
        assert len(list(cache.folder.iterdir())) == 4 * min(epoch + 1, 2)
    monkeypatch.setattr(DocumentIndex, "_build", None)  # what is there is not built
    assert np.array_equal(windows(source, cache)[3 * per_epoch], in_memory[3 * per_epoch])


def test_a_flipped_bit_in_the_cache_changes_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = np.random.default_rng(1).integers(0, 30, 1000).astype(np.int32)
    in_memory = windows(Sizes(sizes), None)
    monkeypatch.setattr(sample_index, "SEGMENT", 256)
    cache = IndexCache(tmp_path)
    windows(Sizes(sizes), cache)[0]
    draw = random.Random(2)
    for turn in range(20):
        path = sorted(cache.folder.iterdir())[turn % 4]
        times, data = path.stat(), bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        monkeypatch.setattr(data_cache, "_STARTED_NS", time.time_ns())  # another job
        found = windows(Sizes(sizes), cache)
        for index in range(0, in_memory.per_epoch, 5):
            assert np.array_equal(found[index], in_memory[index]), (turn, index)


@pytest.mark.parametrize("changed", ["data", "documents", "numbers", "seed", "format", "epoch"])
def test_nothing_stale_is_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    """Row D16."""
    monkeypatch.setattr(sample_index, "SEGMENT", 100)
    sizes, cache, numbers = np.full(400, 20, np.int32), IndexCache(tmp_path), np.arange(0, 400, 2)
    windows(Sizes(sizes), cache, documents=(0, 300))[0]
    windows(Sizes(sizes), cache, documents=numbers)[0]
    source, documents, seed, index = Sizes(sizes), (0, 300), 3, 0
    if changed == "data":
        source = Sizes(sizes + 1, "other")
    elif changed == "documents":
        documents = (1, 301)
    elif changed == "numbers":
        documents = numbers + 1  # type: ignore[assignment]
    elif changed == "seed":
        seed = 4
    elif changed == "format":
        monkeypatch.setattr(sample_index, "FORMAT", 2)
    else:
        index = 10**6
    built: list[int] = []
    build = DocumentIndex._build
    monkeypatch.setattr(DocumentIndex, "_build", lambda order, k: built.append(k) or build(order, k))
    found = windows(source, cache, seed, documents)[index]
    assert built and np.array_equal(found, windows(source, None, seed, documents)[index])


def test_more_tokens_than_two_to_the_31_and_to_the_40() -> None:
    """Row D13: sizes alone; places are those of Python's unbounded numbers."""
    for size in (2**30, 2**40):
        source = Sizes(np.full(300, size, np.int64))
        order, permutation = DocumentIndex(source, (0, 300), seed=1, epoch=0), Permutation(300, "documents", 1, 0)
        for place in (0, 1, 63, 64, 200, 299):
            start = place * size + 5
            assert order.pieces(start, start + 3) == [(permutation(place), 5, 3)]
        assert num_tokens_of(source.sizes, (0, 300)) == 300 * size
        assert num_tokens_of(source.sizes, np.arange(300)) == 300 * size


def test_numbers_are_int32_while_that_holds_them() -> None:
    assert number_type((0, 2**31)) is np.int32 and number_type((5, 2**31 + 1)) is np.int64
    assert number_type(np.array([1, 2**31 - 1])) is np.int32 and number_type(np.array([1, 2**31])) is np.int64
    assert DocumentIndex(Sizes([3]), (0, 1), seed=1, epoch=0)._segments[0].numbers.dtype == np.int32


def test_sizes_are_taken_from_unaligned_memory_without_a_copy_of_all() -> None:
    sizes = unaligned(np.arange(1000, dtype=np.int32))
    assert not sizes.flags.aligned
    assert sizes_of(sizes, np.array([999, 0, 5], np.int32)).tolist() == [999, 0, 5]


def test_the_key_of_documents_is_that_of_checkpoints() -> None:
    """Fingerprints in checkpoints hold it."""
    assert documents_key((1, 6)) == "(1, 6)"
    assert documents_key(np.array([1, 2, 5], np.int32)) == documents_key(np.array([1, 2, 5])) == KEY
    assert documents_key(np.array([1, 2, 6])) != KEY


KEY = "3 documents 453d878e3ed0a553"


def test_an_error_names_documents_of_either_kind() -> None:
    for documents, text in (((2, 4), "documents 2:4 hold 2"), (np.array([1, 2, 4]), "3 documents of a split by hash")):
        with pytest.raises(ValueError, match=text):
            windows(Sizes(np.ones(9, np.int32)), None, documents=documents)

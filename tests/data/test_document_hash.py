from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data import IndexedDataset, split
from megatron.data.cache import IndexCache
from megatron.data.split import document_hashes, split_by_hash
from tests.data.megatron_writers import write_core

MASK = (1 << 64) - 1


def reference_hash(tokens: list[int]) -> int:
    """The hash of one document, written out."""
    value = sum((token + 1) * pow(0x9E3779B97F4A7C15, position, 1 << 64) for position, token in enumerate(tokens))
    value = (value + len(tokens) * 0xD6E8FEB86659FD93) & MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return (value ^ (value >> 31)) >> 32


def write(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> IndexedDataset:
    write_core(prefix, [[document] for document in documents], dtype)
    return IndexedDataset(prefix)


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 99), max_size=12), min_size=1, max_size=12), st.integers(0, 5))
def test_hashes_match_reference_for_any_block(tmp_path: Path, documents: list[list[int]], first: int) -> None:
    file = write(tmp_path / "a", documents)
    expected = [reference_hash(document) for document in documents]
    for block in (5, 1 << 16):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(split, "_BLOCK", block)
            split._powers.cache_clear()
            assert document_hashes(file, min(first, len(documents)), len(documents)).tolist() == expected[first:]
    split._powers.cache_clear()


def random_documents(num_documents: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 99, size).tolist() for size in generator.integers(0, 9, num_documents)]


def split_by_text(file: IndexedDataset, weights: str) -> dict[tuple[int, ...], int]:
    """Which split the text of each document is in; asserts that it is one, and that every document is in one."""
    splits = split_by_hash(file, weights, None)
    assert sorted(np.concatenate(splits).tolist()) == list(range(file.num_documents))
    split_of_text: dict[tuple[int, ...], int] = {}
    for split_idx, documents in enumerate(splits):
        assert (np.diff(documents) > 0).all() and documents.dtype == np.int32
        for document in documents:
            text = tuple(file.read(int(document)).tolist())
            assert split_of_text.setdefault(text, split_idx) == split_idx
    return split_of_text


def test_equal_documents_share_split_and_additions_move_none(tmp_path: Path) -> None:
    first = random_documents(600)
    before = split_by_text(write(tmp_path / "a", first), "8,1,1")
    added = random_documents(400, seed=1) + first[::-1]
    after = split_by_text(
        write(tmp_path / "b", added, "int32"), "8,1,1"
    )  # another type, other places, everything twice
    assert before.items() <= after.items()
    counts = np.bincount(list(after.values()), minlength=3) / len(after)
    assert np.abs(counts - (0.8, 0.1, 0.1)).max() < 0.05


def test_growing_validation_and_test_keep_their_documents(tmp_path: Path) -> None:
    file = write(tmp_path / "a", random_documents(600))
    small, large = split_by_text(file, "90,5,5"), split_by_text(file, "70,10,20")
    assert all(large[text] == split_idx for text, split_idx in small.items() if split_idx)
    assert set(split_by_text(file, "1").values()) == {0}
    assert set(split_by_text(file, "0,1,2").values()) == {1, 2}


def test_hash_split_is_cached_and_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = write(tmp_path / "a", random_documents(300)), IndexCache(tmp_path / "cache")
    expected = split_by_hash(file, "8,1,1", None)
    monkeypatch.setattr(split, "_IN_MEMORY_BELOW_BYTES", 0)
    monkeypatch.setattr(split, "_DOCUMENTS_PER_FILE", 64)
    for _ in range(2):
        cached_split = split_by_hash(file, "8,1,1", cache)
        assert [documents.tolist() for documents in cached_split] == [documents.tolist() for documents in expected]
        monkeypatch.setattr(split, "document_hashes", None)  # nothing is hashed twice, for other shares either
    assert split_by_hash(file, "1", cache)[0].tolist() == list(range(300))


def test_changed_file_is_rehashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "_IN_MEMORY_BELOW_BYTES", 0)
    cache, documents = IndexCache(tmp_path / "cache"), random_documents(300)
    split_by_hash(write(tmp_path / "a", documents), "1,1", cache)
    changed = write(tmp_path / "a", [[98 - token for token in document] for document in documents])
    expected = split_by_hash(changed, "1,1", None)
    assert [documents.tolist() for documents in split_by_hash(changed, "1,1", cache)] == [
        documents.tolist() for documents in expected
    ]


def test_document_hashes_are_stable(tmp_path: Path) -> None:
    """Written down: a resumed run must find its documents in the split that they were in."""
    hashes = document_hashes(write(tmp_path / "a", [[1, 2, 3], [], [3, 2, 1]]), 0, 3)
    assert hashes.dtype == np.uint32 and hashes.tolist() == HASHES


HASHES = [2036120781, 0, 1615243438]

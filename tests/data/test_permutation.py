from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.permutation import Permutation


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_every_index_appears_once_and_both_forms_agree(size: int, seed: int) -> None:
    permutation = Permutation(size, "x", seed)
    values = permutation.array(np.arange(size))
    assert np.array_equal(np.sort(values), np.arange(size))
    assert [permutation(index) for index in range(min(size, 20))] == values[:20].tolist()


def test_beyond_two_to_the_31_it_stays_a_permutation() -> None:
    permutation = Permutation(2**40 + 7, 1)
    places = np.arange(2**40 - 5000, 2**40 + 7, dtype=np.int64)
    values = permutation.array(places)
    assert len(set(values.tolist())) == len(places) and values.max() > 2**31 and values.max() < 2**40 + 7
    assert permutation(2**40) == values[5000]


def test_it_depends_on_the_key_and_looks_uniform() -> None:
    first = np.array([[Permutation(5, seed)(place) for place in range(5)] for seed in range(2000)])
    for place in range(5):
        counts = np.bincount(first[:, place], minlength=5)
        assert abs(counts - 400).max() < 100  # five standard deviations


def test_the_order_is_the_same_for_ever() -> None:
    assert Permutation(10, "documents", 1234, 0).array(np.arange(10)).tolist() == FIXED


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 1 << 34), st.integers(0, 2**63), st.data())
def test_blocks_of_any_place_equal_the_walk_of_single_numbers(size: int, start: int, data: st.DataObject) -> None:
    permutation = Permutation(size, "documents", start, 3)
    count = data.draw(st.integers(1, min(size, 50)))
    first = data.draw(st.integers(0, size - count))
    places = np.empty(count, np.int32 if size < 1 << 31 else np.int64)
    permutation.fill(places, first)
    assert places.tolist() == [permutation(index) for index in range(first, first + count)]


def test_block_borders_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    permutation, whole, cut = Permutation(300_000, "x"), np.empty(300_000, np.int32), np.empty(300_000, np.int64)
    permutation.fill(whole, 0)
    monkeypatch.setattr("megatron.data.permutation._IN_CACHE", 977)
    monkeypatch.setattr("megatron.data.permutation._AT_ONCE", 50_021)
    permutation.fill(cut, 0)
    assert np.array_equal(whole, cut) and np.array_equal(np.sort(whole), np.arange(300_000))
    assert np.array_equal(permutation.array(np.arange(300_000)[::-1]), whole[::-1])


FIXED = [5, 6, 4, 7, 2, 0, 1, 3, 8, 9]

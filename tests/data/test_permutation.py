from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.permutation import Permutation


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_every_index_appears_once_and_scalar_matches_array(size: int, seed: int) -> None:
    permutation = Permutation(size, "x", seed)
    values = permutation.array(np.arange(size))
    assert np.array_equal(np.sort(values), np.arange(size))
    assert [permutation(index) for index in range(min(size, 20))] == values[:20].tolist()


def test_values_beyond_2_31_stay_permutation() -> None:
    permutation = Permutation(2**40 + 7, 1)
    indices = np.arange(2**40 - 5000, 2**40 + 7, dtype=np.int64)
    values = permutation.array(indices)
    assert len(set(values.tolist())) == len(indices) and values.max() > 2**31 and values.max() < 2**40 + 7
    assert permutation(2**40) == values[5000]


def test_permutation_depends_on_key_and_is_uniform() -> None:
    samples = np.array([[Permutation(5, seed)(position) for position in range(5)] for seed in range(2000)])
    for position in range(5):
        counts = np.bincount(samples[:, position], minlength=5)
        assert abs(counts - 400).max() < 100  # five standard deviations


def test_permutation_is_stable() -> None:
    assert Permutation(10, "documents", 1234, 0).array(np.arange(10)).tolist() == EXPECTED


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 1 << 34), st.integers(0, 2**63), st.data())
def test_fill_at_any_offset_equals_scalar_calls(size: int, seed: int, data: st.DataObject) -> None:
    permutation = Permutation(size, "documents", seed, 3)
    count = data.draw(st.integers(1, min(size, 50)))
    first = data.draw(st.integers(0, size - count))
    values = np.empty(count, np.int32 if size < 1 << 31 else np.int64)
    permutation.fill(values, first)
    assert values.tolist() == [permutation(index) for index in range(first, first + count)]


def test_block_size_does_not_change_values(monkeypatch: pytest.MonkeyPatch) -> None:
    permutation, unblocked, blocked = (
        Permutation(300_000, "x"),
        np.empty(300_000, np.int32),
        np.empty(300_000, np.int64),
    )
    permutation.fill(unblocked, 0)
    monkeypatch.setattr("megatron.data.permutation._ROUND_BLOCK", 977)
    monkeypatch.setattr("megatron.data.permutation._WALK_BLOCK", 50_021)
    permutation.fill(blocked, 0)
    assert np.array_equal(unblocked, blocked) and np.array_equal(np.sort(unblocked), np.arange(300_000))
    assert np.array_equal(permutation.array(np.arange(300_000)[::-1]), unblocked[::-1])


EXPECTED = [5, 6, 4, 7, 2, 0, 1, 3, 8, 9]

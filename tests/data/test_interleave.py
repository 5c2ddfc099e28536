"""Which corpus a sample comes from, against a loop over exact fractions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.blend_index import BlendIndex

WEIGHTS = st.lists(st.integers(0, 30) | st.sampled_from([1, 1000, 2**40]), min_size=1, max_size=8).filter(any)


def reference_order(weights: list[int]) -> Iterator[int]:
    """Put the two lightest groups together until one is left; yield corpora for ever."""
    groups: list[Any] = [(weight, corpus, corpus) for corpus, weight in enumerate(weights) if weight]
    while len(groups) > 1:
        lightest, second_lightest, *groups = sorted(groups)
        first, second = sorted((lightest, second_lightest), key=lambda group: group[1])
        groups.append((first[0] + second[0], first[1], (first, second)))
    return merge_by_time(groups[0][2])


def merge_by_time(group: Any) -> Iterator[int]:
    if isinstance(group, int):
        yield from itertools.repeat(group)
    streams, num_yielded = [merge_by_time(group[2]) for group in group], [0, 0]
    while True:
        member = min((0, 1), key=lambda member: Fraction(2 * num_yielded[member] + 1, 2 * group[member][0]))
        num_yielded[member] += 1
        yield next(streams[member])


@settings(max_examples=60)
@given(WEIGHTS)
def test_interleaving_equals_loop_over_times(weights: list[int]) -> None:
    interleaving, num_read = BlendIndex(weights), [0] * len(weights)
    for index, corpus in enumerate(itertools.islice(reference_order(weights), 150)):
        assert interleaving.locate(index) == (corpus, num_read[corpus]), (
            "samples of a corpus come without gap or repeat"
        )
        assert interleaving.counts(index) == tuple(num_read)
        num_read[corpus] += 1


@settings(max_examples=40)
@given(WEIGHTS, st.integers(0, 2**62))
def test_counts_stay_near_weight_shares(weights: list[int], index: int) -> None:
    max_error = 1 if sum(map(bool, weights)) <= 3 else Fraction(17, 10)
    interleaving, total = BlendIndex(weights), sum(weights)
    for num_samples in (index, 2**62 - index, index % 1000, index % (3 * total)):
        counts = interleaving.counts(num_samples)
        assert sum(counts) == num_samples
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - Fraction(num_samples * weight, total)) < max_error
            assert weight or not count


def test_heavy_corpus_and_many_light_ones_stay_within_one_sample() -> None:
    """Merged by their times in one go, the 50 light ones would come in a row and the heavy one be 12 off."""
    interleaving, num_read = BlendIndex([50] + [1] * 50), [0] * 51
    for index in range(200):
        num_read[interleaving.locate(index)[0]] += 1
        assert abs(num_read[0] - (index + 1) / 2) < 1 and max(num_read[1:]) - min(num_read[1:]) <= 1


@settings(max_examples=30)
@given(WEIGHTS, st.integers(0, 200), st.sampled_from([2**20, 2**40, 2**62]))
def test_order_repeats_with_sum_of_weights(weights: list[int], index: int, periods: int) -> None:
    """Sums of weights reach 2^43 and samples 2^105 here: nothing is rounded and nothing overflows."""
    interleaving = BlendIndex(weights)
    corpus, sample_idx = interleaving.locate(index)
    assert interleaving.locate(index + periods * sum(weights)) == (corpus, sample_idx + periods * weights[corpus])


def test_ranks_decide_instead_of_list_position() -> None:
    weights, ranks = [5, 5, 2, 0, 7], [3, 0, 4, 2, 1]
    ranked = BlendIndex(weights, ranks)
    reordered = BlendIndex([weights[ranks.index(rank)] for rank in range(5)])
    assert [(ranks[corpus], sample_idx) for corpus, sample_idx in map(ranked.locate, range(99))] == [
        reordered.locate(idx) for idx in range(99)
    ]


def test_two_corpora_interleave_by_weight() -> None:
    assert [BlendIndex([7, 3]).locate(index)[0] for index in range(10)] == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    assert BlendIndex([0, 4]).locate(9) == (1, 9)


@pytest.mark.parametrize("weights", [[1], [0, 3]])
def test_single_corpus_is_identity(weights: list[int]) -> None:
    assert BlendIndex(weights).locate(2**70) == (len(weights) - 1, 2**70)

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


def reference(weights: list[int]) -> Iterator[int]:
    """Put the two lightest groups together until one is left; yield corpora for ever."""
    groups: list[Any] = [(weight, number, number) for number, weight in enumerate(weights) if weight]
    while len(groups) > 1:
        one, other, *groups = sorted(groups)
        first, second = sorted((one, other), key=lambda group: group[1])
        groups.append((first[0] + second[0], first[1], (first, second)))
    return by_time(groups[0][2])


def by_time(group: Any) -> Iterator[int]:
    if isinstance(group, int):
        yield from itertools.repeat(group)
    streams, given_so_far = [by_time(member[2]) for member in group], [0, 0]
    while True:
        side = min((0, 1), key=lambda side: Fraction(2 * given_so_far[side] + 1, 2 * group[side][0]))
        given_so_far[side] += 1
        yield next(streams[side])


@settings(max_examples=60)
@given(WEIGHTS)
def test_it_equals_a_loop_over_times(weights: list[int]) -> None:
    interleaving, read = BlendIndex(weights), [0] * len(weights)
    for index, corpus in enumerate(itertools.islice(reference(weights), 150)):
        assert interleaving.locate(index) == (corpus, read[corpus]), "samples of a corpus come without gap or repeat"
        assert interleaving.counts(index) == tuple(read)
        read[corpus] += 1


@settings(max_examples=40)
@given(WEIGHTS, st.integers(0, 2**62))
def test_counts_stay_near_their_shares_for_ever(weights: list[int], index: int) -> None:
    most = 1 if sum(map(bool, weights)) <= 3 else Fraction(17, 10)
    interleaving, total = BlendIndex(weights), sum(weights)
    for number in (index, 2**62 - index, index % 1000, index % (3 * total)):
        counts = interleaving.counts(number)
        assert sum(counts) == number
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - Fraction(number * weight, total)) < most
            assert weight or not count


def test_a_heavy_corpus_and_many_light_ones_are_within_one() -> None:
    """Merged by their times in one go, the 50 light ones would come in a row and the heavy one be 12 off."""
    interleaving, read = BlendIndex([50] + [1] * 50), [0] * 51
    for index in range(200):
        read[interleaving.locate(index)[0]] += 1
        assert abs(read[0] - (index + 1) / 2) < 1 and max(read[1:]) - min(read[1:]) <= 1


@settings(max_examples=30)
@given(WEIGHTS, st.integers(0, 200), st.sampled_from([2**20, 2**40, 2**62]))
def test_the_order_repeats_with_the_sum_of_the_weights(weights: list[int], index: int, periods: int) -> None:
    """Sums of weights reach 2^43 and samples 2^105 here: nothing is rounded and nothing overflows."""
    interleaving = BlendIndex(weights)
    corpus, place = interleaving.locate(index)
    assert interleaving.locate(index + periods * sum(weights)) == (corpus, place + periods * weights[corpus])


def test_ranks_decide_and_not_the_place_in_the_list() -> None:
    weights, ranks = [5, 5, 2, 0, 7], [3, 0, 4, 2, 1]
    listed = BlendIndex(weights, ranks)
    other = BlendIndex([weights[ranks.index(rank)] for rank in range(5)])
    assert [(ranks[c], k) for c, k in map(listed.locate, range(99))] == [other.locate(i) for i in range(99)]


def test_two_corpora_as_their_times_say() -> None:
    assert [BlendIndex([7, 3]).locate(index)[0] for index in range(10)] == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    assert BlendIndex([0, 4]).locate(9) == (1, 9)


@pytest.mark.parametrize("weights", [[1], [0, 3]])
def test_one_corpus_is_itself(weights: list[int]) -> None:
    assert BlendIndex(weights).locate(2**70) == (len(weights) - 1, 2**70)

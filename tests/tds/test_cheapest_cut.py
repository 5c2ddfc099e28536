"""The one dynamic program makes the cuts of the two that it replaces, to the bit."""

from __future__ import annotations

from itertools import accumulate
from math import inf
from operator import add

from hypothesis import given, settings
from hypothesis import strategies as st

from tds.partition import TOLERANCE, _cheapest_cut, _smallest_maximum, balanced_bounds

WEIGHTS = st.lists(
    st.one_of(st.integers(0, 4).map(float), st.sampled_from([0.1, 0.2, 0.3]), st.floats(0, 9.0)),
    min_size=1,
    max_size=14,
)


@settings(max_examples=600, deadline=None)
@given(WEIGHTS, st.integers(1, 14))
def test_least_squares_below_the_smallest_maximum(weights, num_parts):
    num_parts, upto = min(num_parts, len(weights)), [0.0, *accumulate(weights)]

    def run(start, stop):
        return upto[stop] - upto[start]

    limit, _ = _cheapest_cut(len(weights), num_parts, run, max)

    def squared(start, stop):
        return run(start, stop) * run(start, stop) if run(start, stop) <= limit else inf

    assert _cheapest_cut(len(weights), num_parts, squared, add)[1] == balanced_bounds(weights, num_parts)


@settings(max_examples=600, deadline=None)
@given(WEIGHTS, st.integers(1, 14), st.randoms(use_true_random=False))
def test_smallest_maximum_of_what_is_allowed(weights, num_parts, random):
    num_parts, upto = min(num_parts, len(weights)), [0.0, *accumulate(weights)]
    others = [random.choice([0, 1, 2, 700, 701]) for _ in weights]
    upto_others = [0.0, *accumulate(others)]

    def run(start, stop):
        return upto[stop] - upto[start]

    slowest, bounds = _cheapest_cut(len(weights), num_parts, run, max, "last")
    assert (slowest, bounds) == _smallest_maximum(weights, num_parts, lambda start, stop: True)
    limit = slowest * (1 + TOLERANCE)

    def allowed(start, stop):
        return upto_others[stop] - upto_others[start] if run(start, stop) <= limit else inf

    wanted = _smallest_maximum(others, num_parts, lambda start, stop: run(start, stop) <= limit)
    assert _cheapest_cut(len(weights), num_parts, allowed, max, "last") == wanted

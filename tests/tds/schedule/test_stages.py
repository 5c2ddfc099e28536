"""Stages by arithmetic: partitions against trying all of them, closed forms against the schedules themselves."""

from __future__ import annotations

from itertools import accumulate, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.models.t5.config import t5_units
from tds import partition
from tds.schedule import Costs, schedule_named, simulate, validate
from tds.schedule.schedules import BackwardInput, zero_bubble_h1
from tds.schedule.simulate import MANY_CHUNKS, ONE_CHUNK, bubble, by_default, candidates, in_flight, share_split

NAMES = [(name, 1) for name in ONE_CHUNK] + [(name, c) for name in MANY_CHUNKS for c in (2, 3)]


def sums(costs, bounds, num_stages):
    """Return the cost of each stage's pieces together."""
    pieces = [partition.chunks_on(bounds, num_stages, stage) for stage in range(num_stages)]
    return [sum(sum(costs[start:stop]) for start, stop in own) for own in pieces]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 9).map(float), st.floats(0.01, 9.0)), min_size=1, max_size=9), st.integers(1, 9)
)
def test_balanced_bounds_are_as_good_as_the_best_of_all_partitions(costs, parts):
    parts = min(parts, len(costs))
    found = partition.partition_balanced(costs, parts)
    assert found[0] == 0 and found[-1] == len(costs) and len(found) == parts + 1
    assert all(a < b for a, b in zip(found, found[1:], strict=False))
    every = [[0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), parts - 1)]
    assert max(sums(costs, found, parts)) == pytest.approx(min(max(sums(costs, bounds, parts)) for bounds in every))


def test_equal_layers_are_spread_evenly_and_more_parts_than_layers_are_an_error():
    assert partition.partition_balanced([1.0] * 9, 4) == [0, 2, 4, 6, 9]
    with pytest.raises(ValueError, match="3 layers can be partitioned into 1 to 3 parts, got 4"):
        partition.partition_balanced([1.0] * 3, 4)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 3), st.integers(2, 3), st.integers(0, 3), st.floats(0, 1), st.floats(0, 6))
def test_no_other_cut_into_chunks_has_a_cheaper_largest_piece_and_then_stage(num_stages, num_chunks, more, first, last):
    num_pieces = num_stages * num_chunks
    number = num_pieces + more
    counts = partition.partition_uniform_chunks(number, num_stages, num_chunks, first, last)
    assert sum(counts) == number and min(counts) >= 1 and len(counts) == num_pieces
    costs = [1.0] * number
    costs[0] += first
    costs[-1] += last

    def largest(bounds):
        return round(max(sums(costs, bounds, num_pieces)), 6), round(max(sums(costs, bounds, num_stages)), 6)

    every = [[0, *inner, number] for inner in combinations(range(1, number), num_pieces - 1)]
    assert largest([0, *accumulate(counts)]) == min(map(largest, every))


def test_equal_layers_make_equal_chunks_and_a_heavy_head_a_short_last_one():
    assert partition.partition_uniform_chunks(8, 2, 2, 0.0, 0.0) == [2, 2, 2, 2]
    assert partition.partition_uniform_chunks(12, 2, 3, 0.0, 0.0) == [2] * 6
    assert partition.partition_uniform_chunks(8, 2, 2, 0.0, 2.77) == [2, 2, 3, 1]
    with pytest.raises(ValueError, match="3 layers .*, got 2 stages x 2 chunks = 4"):
        partition.partition_uniform_chunks(3, 2, 2, 0.0, 0.0)


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_as_many_backwards_are_split_as_the_schedule_itself_splits(num_chunks: int) -> None:
    for p in (2, 3, 4):
        for m in (1, 2, 3, 4, 5, 8, 13) if num_chunks == 1 else (p, p + 1, 2 * p + 1, 4 * p):
            for stage in range(p):
                actions = zero_bubble_h1(p, m, stage, num_chunks)
                split = sum(isinstance(action, BackwardInput) for action in actions)
                assert share_split(p, m, "zb-h1", stage, num_chunks) == pytest.approx(split / (m * num_chunks))


@pytest.mark.parametrize(("name", "num_chunks"), NAMES)
def test_as_many_forwards_are_in_flight_as_the_schedule_itself_keeps(name, num_chunks):
    order = schedule_named(name, num_chunks)
    for p in (2, 3, 4, 8):
        for m in (1, p - 1, p, 4 * p) if num_chunks == 1 else (p, 4 * p):
            actions = [order(p, m, stage) for stage in range(p)]
            counted = [in_flight(p, m, name, num_chunks, stage) for stage in range(p)]
            held = validate(actions, m, num_chunks=num_chunks)
            if name == "zb-h1" and num_chunks > 1 and counted[1] == held[1] + 1:  # where it splits its last round alone
                counted[1] -= 1
            assert counted == held, (p, m)


def test_auto_is_reckoned_by_its_worst_and_its_default_follows_the_chunks():
    assert in_flight(4, 8, "auto", 1, 3) == 8
    assert candidates("auto", 1) == ONE_CHUNK
    assert candidates("auto", 2) == ("interleaved", "zb-h1")
    assert in_flight(4, 8, "auto", 2, 3) == 8
    assert (by_default(1), by_default(2)) == ("1f1b", "interleaved")


@pytest.mark.parametrize(("name", "num_chunks"), NAMES)
def test_the_bubble_of_equal_stages_is_the_one_that_is_simulated(name, num_chunks):
    for p in (2, 3, 4, 8):
        for m in (1, p - 1, p, p + 1, 4 * p):
            actions = [schedule_named(name, num_chunks)(p, m, stage) for stage in range(p)]
            simulated = simulate(actions, Costs.even(p * num_chunks), num_chunks).bubble
            predicted = bubble(p, m, name, num_chunks)
            apart = 1e-9
            if num_chunks > 1 and m % p:
                apart = 0.06 if name == "zb-h1" else 0.01 if m > p else apart
                assert predicted <= bubble(p, m, "interleaved", num_chunks) + 1e-9, (p, m)
            assert predicted == pytest.approx(simulated, abs=apart), (p, m)


@pytest.mark.parametrize(("name", "num_chunks"), [(name, c) for name, c in NAMES if c < 3])
def test_the_bubble_of_unequal_pieces_is_near_the_one_that_is_simulated(name, num_chunks):
    counts = partition.partition_uniform_chunks(16, 4, num_chunks, 0.0, 2.0)
    costs = [*counts[:-1], counts[-1] + 2.0]
    halves = tuple(cost / 3 for cost in costs)
    actions = [schedule_named(name, num_chunks)(4, 16, stage) for stage in range(4)]
    simulated = simulate(actions, Costs(halves, halves, halves), num_chunks).bubble
    assert bubble(4, 16, name, num_chunks, costs) == pytest.approx(simulated, abs=0.05)


def test_the_bubble_is_the_share_of_idle_slots():
    assert bubble(4, 12) == pytest.approx(3 / 15)
    assert bubble(4, 12, "gpipe") == pytest.approx(3 / 15)
    assert bubble(4, 12, "interleaved", 2) == pytest.approx(3 / 27)
    assert bubble(4, 12, "zb-h1") == pytest.approx(3 / 39)
    assert bubble(4, 12, "zb-h1", 2) == pytest.approx(3 / 75)
    assert bubble(2, 8, piece_costs=[1.0, 3.0]) == pytest.approx(1 - 8 * 4 / (2 * 25))


@pytest.mark.parametrize(("encoder", "decoder"), [(1, 1), (2, 3), (4, 1)])
def test_units_of_t5_lie_one_behind_the_other(encoder: int, decoder: int) -> None:
    units = t5_units(encoder, decoder)
    places = [units.enc_embedding, *units.enc_layers, units.enc_norm]
    places += [units.dec_embedding, *units.dec_layers, units.dec_norm, units.head]
    assert places == list(range(encoder + decoder + 5))
    assert (len(units.enc_layers), len(units.dec_layers)) == (encoder, decoder)

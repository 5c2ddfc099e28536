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
from tds.schedule.simulate import (
    MANY_CHUNKS,
    ONE_CHUNK,
    bubble,
    candidate_schedules,
    default_schedule,
    in_flight,
    split_fraction,
)

NAMES = [(name, 1) for name in ONE_CHUNK] + [(name, c) for name in MANY_CHUNKS for c in (2, 3)]


def stage_costs(costs, bounds, num_stages):
    """Return the cost of each stage's chunks together."""
    chunks = [partition.chunks_on(bounds, num_stages, stage) for stage in range(num_stages)]
    return [sum(sum(costs[start:stop]) for start, stop in spans) for spans in chunks]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 9).map(float), st.floats(0.01, 9.0)), min_size=1, max_size=9), st.integers(1, 9)
)
def test_balanced_partition_matches_exhaustive_search(costs, num_parts):
    num_parts = min(num_parts, len(costs))
    balanced = partition.partition_balanced(costs, num_parts)
    assert balanced[0] == 0 and balanced[-1] == len(costs) and len(balanced) == num_parts + 1
    assert all(a < b for a, b in zip(balanced, balanced[1:], strict=False))
    all_partitions = [[0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), num_parts - 1)]
    assert max(stage_costs(costs, balanced, num_parts)) == pytest.approx(
        min(max(stage_costs(costs, bounds, num_parts)) for bounds in all_partitions)
    )


def test_equal_layers_are_balanced_and_too_many_parts_raise():
    assert partition.partition_balanced([1.0] * 9, 4) == [0, 2, 4, 6, 9]
    with pytest.raises(ValueError, match="3 layers can be partitioned into 1 to 3 parts, got 4"):
        partition.partition_balanced([1.0] * 3, 4)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 3), st.integers(2, 3), st.integers(0, 3), st.floats(0, 1), st.floats(0, 6))
def test_uniform_chunks_match_exhaustive_search(num_stages, num_chunks, num_extra, first, last):
    num_virtual_stages = num_stages * num_chunks
    num_layers = num_virtual_stages + num_extra
    counts = partition.partition_uniform_chunks(num_layers, num_stages, num_chunks, first, last)
    assert sum(counts) == num_layers and min(counts) >= 1 and len(counts) == num_virtual_stages
    costs = [1.0] * num_layers
    costs[0] += first
    costs[-1] += last

    def largest(bounds):
        return round(max(stage_costs(costs, bounds, num_virtual_stages)), 6), round(
            max(stage_costs(costs, bounds, num_stages)), 6
        )

    all_partitions = [[0, *inner, num_layers] for inner in combinations(range(1, num_layers), num_virtual_stages - 1)]
    assert largest([0, *accumulate(counts)]) == min(map(largest, all_partitions))


def test_heavy_last_layer_shortens_last_chunk():
    assert partition.partition_uniform_chunks(8, 2, 2, 0.0, 0.0) == [2, 2, 2, 2]
    assert partition.partition_uniform_chunks(12, 2, 3, 0.0, 0.0) == [2] * 6
    assert partition.partition_uniform_chunks(8, 2, 2, 0.0, 2.77) == [2, 2, 3, 1]
    with pytest.raises(ValueError, match="3 layers .*, got 2 stages x 2 chunks = 4"):
        partition.partition_uniform_chunks(3, 2, 2, 0.0, 0.0)


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_split_fraction_equals_schedule(num_chunks: int) -> None:
    for p in (2, 3, 4):
        for m in (1, 2, 3, 4, 5, 8, 13) if num_chunks == 1 else (p, p + 1, 2 * p + 1, 4 * p):
            for stage in range(p):
                actions = zero_bubble_h1(p, m, stage, num_chunks)
                split = sum(isinstance(action, BackwardInput) for action in actions)
                assert split_fraction(p, m, "zb-h1", stage, num_chunks) == pytest.approx(split / (m * num_chunks))


@pytest.mark.parametrize(("name", "num_chunks"), NAMES)
def test_in_flight_count_equals_schedule(name, num_chunks):
    order = schedule_named(name, num_chunks)
    for p in (2, 3, 4, 8):
        for m in (1, p - 1, p, 4 * p) if num_chunks == 1 else (p, 4 * p):
            actions = [order(p, m, stage) for stage in range(p)]
            predicted = [in_flight(p, m, name, num_chunks, stage) for stage in range(p)]
            peaks = validate(actions, m, num_chunks=num_chunks)
            if (
                name == "zb-h1" and num_chunks > 1 and predicted[1] == peaks[1] + 1
            ):  # where it splits its last round alone
                predicted[1] -= 1
            assert predicted == peaks, (p, m)


def test_auto_uses_worst_case_memory_and_chunk_dependent_default():
    assert in_flight(4, 8, "auto", 1, 3) == 8
    assert candidate_schedules("auto", 1) == ONE_CHUNK
    assert candidate_schedules("auto", 2) == ("interleaved", "zb-h1")
    assert in_flight(4, 8, "auto", 2, 3) == 8
    assert (default_schedule(1), default_schedule(2)) == ("1f1b", "interleaved")


@pytest.mark.parametrize(("name", "num_chunks"), NAMES)
def test_bubble_of_equal_stages_equals_simulation(name, num_chunks):
    for p in (2, 3, 4, 8):
        for m in (1, p - 1, p, p + 1, 4 * p):
            actions = [schedule_named(name, num_chunks)(p, m, stage) for stage in range(p)]
            simulated = simulate(actions, Costs.even(p * num_chunks), num_chunks).bubble
            predicted = bubble(p, m, name, num_chunks)
            tolerance = 1e-9
            if num_chunks > 1 and m % p:
                tolerance = 0.06 if name == "zb-h1" else 0.01 if m > p else tolerance
                assert predicted <= bubble(p, m, "interleaved", num_chunks) + 1e-9, (p, m)
            assert predicted == pytest.approx(simulated, abs=tolerance), (p, m)


@pytest.mark.parametrize(("name", "num_chunks"), [(name, c) for name, c in NAMES if c < 3])
def test_bubble_of_unequal_chunks_approximates_simulation(name, num_chunks):
    counts = partition.partition_uniform_chunks(16, 4, num_chunks, 0.0, 2.0)
    costs = [*counts[:-1], counts[-1] + 2.0]
    thirds = tuple(cost / 3 for cost in costs)
    actions = [schedule_named(name, num_chunks)(4, 16, stage) for stage in range(4)]
    simulated = simulate(actions, Costs(thirds, thirds, thirds), num_chunks).bubble
    assert bubble(4, 16, name, num_chunks, costs) == pytest.approx(simulated, abs=0.05)


def test_bubble_matches_closed_form():
    assert bubble(4, 12) == pytest.approx(3 / 15)
    assert bubble(4, 12, "gpipe") == pytest.approx(3 / 15)
    assert bubble(4, 12, "interleaved", 2) == pytest.approx(3 / 27)
    assert bubble(4, 12, "zb-h1") == pytest.approx(3 / 39)
    assert bubble(4, 12, "zb-h1", 2) == pytest.approx(3 / 75)
    assert bubble(2, 8, piece_costs=[1.0, 3.0]) == pytest.approx(1 - 8 * 4 / (2 * 25))


@pytest.mark.parametrize(("encoder", "decoder"), [(1, 1), (2, 3), (4, 1)])
def test_t5_units_are_consecutive(encoder: int, decoder: int) -> None:
    units = t5_units(encoder, decoder)
    indices = [units.enc_embedding, *units.enc_layers, units.enc_norm]
    indices += [units.dec_embedding, *units.dec_layers, units.dec_norm, units.head]
    assert indices == list(range(encoder + decoder + 5))
    assert (len(units.enc_layers), len(units.dec_layers)) == (encoder, decoder)

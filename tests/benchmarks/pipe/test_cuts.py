"""Cuts: all of them, those that DeepSpeed can make, and who takes part."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from deepspeed.runtime.utils import partition_balanced

from benchmarks.contenders import GPTSizes, T5Sizes
from benchmarks.pipe.cuts import (
    all_cuts,
    best_chunks,
    best_cuts,
    cuts_of_deepspeed,
    format_cut,
    line_up,
    predicted_s,
    stage_seconds,
)
from benchmarks.pipe.model import MOST_KEPT, Case, cut_by_cost, plain_specs
from tds.schedule import Costs, V, schedule_named, simulate
from tds.schedule.simulate import SCHEDULES, placement_for

SIZES = GPTSizes(num_layers=8, hidden_size=16, num_attention_heads=2, vocab_size=32, seq_length=8)
CASE = Case(name="toy", sizes=SIZES, bar=0.9)
HALVES = plain_specs(CASE, "half")
COSTS = [5.0, *[30.0, 45.0] * 8, 2.0, 210.0]


def test_all_cuts_hold_each_layer_once_and_leave_no_piece_empty() -> None:
    cuts = all_cuts(5, 3)
    assert len(cuts) == len(set(cuts)) == 6
    assert all(bounds[0] == 0 and bounds[-1] == 5 and list(bounds) == sorted(set(bounds)) for bounds in cuts)


def test_cuts_of_deepspeed_are_what_its_methods_give() -> None:
    names = [spec.typename.__name__ for spec in HALVES]
    found = cuts_of_deepspeed(HALVES, 2)
    assert {format_cut(bounds, HALVES) for bounds in found} >= {"4+4", "4.5+3.5", "5+3", "5.5+2.5"}
    for bounds, method in found.items():
        if method.startswith("type:"):
            pattern = re.compile(method.removeprefix("type:").lower(), re.IGNORECASE)  # as DeepSpeed reads it
            weights = [int(bool(pattern.search(name))) for name in names]
            assert tuple(partition_balanced(weights=weights, num_parts=2)) == bounds


def test_the_best_cut_has_the_lowest_slowest_stage() -> None:
    best = best_cuts(all_cuts(len(HALVES), 2), COSTS, 2, 8, 3)
    assert format_cut(best[0], HALVES) == "5.5+2.5"
    slowest = [max(sum(COSTS[a:b]) for a, b in itertools.pairwise(bounds)) for bounds in best]
    assert slowest == sorted(slowest)


def test_pieces_lie_in_a_ring_or_in_a_v() -> None:
    costs = [1.0, 2.0, 3.0, 4.0]
    bounds = (0, 1, 2, 3, 4)
    ring, folded = predicted_s(bounds, costs, 2, 100), predicted_s(bounds, costs, 2, 100, is_v=True)
    assert round(ring) == 600 + 2  # 1 + 3 against 2 + 4
    assert round(folded) in (502, 503)  # 1 + 4 against 2 + 3


def test_the_best_chunks_are_the_fastest_by_simulation() -> None:
    costs = [1.0] * 7 + [4.0]
    for schedule in ("interleaved", "zb-h1", "zb-v"):
        best, lie = best_chunks(costs, 2, 6, 2, schedule), placement_for(schedule)
        order = schedule_named(schedule, 2, lie)
        actions = [order(2, 6, stage) for stage in range(2)]
        pieces = {each: tuple(sum(costs[a:b]) / 3 for a, b in itertools.pairwise(each)) for each in all_cuts(8, 4)}
        steps = {each: simulate(actions, Costs(*[piece] * 3), 2, lie).step_s for each, piece in pieces.items()}
        assert steps[best] == min(steps.values()) < steps[best_cuts(all_cuts(8, 4), costs, 2, 6, 1)[0]] * 1.001


def test_seconds_of_a_stage_are_those_of_its_pieces() -> None:
    assert stage_seconds((0, 1, 2, 3, 4), [1.0, 2.0, 3.0, 4.0], 2) == [4.0, 6.0]
    assert stage_seconds((0, 1, 2, 3, 4), [1.0, 2.0, 3.0, 4.0], 2, V) == [5.0, 5.0]
    assert stage_seconds((0, 1, 3), [1.0, 2.0, 3.0, 4.0], 2) == [], "these are costs of other layers"
    assert stage_seconds((), [1.0], 2) == []


def test_a_t5_runs_each_schedule_at_the_default_cut_too() -> None:
    sizes = T5Sizes(num_layers=3, hidden_size=32, num_attention_heads=2, vocab_size=256, enc_seq_length=16)
    case = Case(name="t5", sizes=sizes)
    by_cost = cut_by_cost(case)
    costs = [1.0] * by_cost[-1]
    costs[-1] = 30.0  # one that the default cannot know
    contenders = line_up(case, costs, 1)
    assert {c.kind for c in contenders} == {"alone", "side by side", "ours"} and {c.layers for c in contenders} == {
        "t5"
    }
    for schedule in ("1f1b", "zb-h1"):
        cuts = [c.partition for c in contenders if c.schedule == schedule and c.kind == "ours" and c.chunks == 1]
        assert by_cost in cuts and len(cuts) == 2
    assert {c.schedule for c in contenders if c.chunks == 2} == {"interleaved", "zb-h1", "zb-v", "dualpipev"}
    assert {c.schedule for c in contenders if c.kind == "ours"} == set(SCHEDULES)
    assert len({c.name for c in contenders}) == len(contenders)


def test_one_f_one_b_of_all_engines_runs_at_the_same_cuts() -> None:
    contenders = line_up(CASE, COSTS, 2)
    cuts = {
        kind: {c.name.split()[-1] for c in contenders if c.name.startswith(kind)} for kind in ("torch", "ours 1f1b")
    }
    stock = [c for c in contenders if c.name.startswith("stock ") and c.layers == "half"]
    assert cuts["torch"] == cuts["ours 1f1b"] >= {"5.5+2.5", stock[0].name.split()[-1]}
    assert {c.schedule for c in contenders if c.kind == "ours"} == set(SCHEDULES)
    assert len({c.name for c in contenders}) == len(contenders)


def test_dualpipev_takes_part_only_with_enough_micro_batches() -> None:
    few = Case(name="few", sizes=SIZES, num_micro_batches=3)
    assert not any(c.kind == "dualpipev" for c in line_up(few, COSTS, 2))
    assert any(c.kind == "dualpipev" for c in line_up(CASE, COSTS, 2))


def test_gpipe_stays_out_of_a_case_whose_activations_would_not_fit() -> None:
    deep = replace(CASE, num_micro_batches=MOST_KEPT // CASE.sizes.num_layers + 1)
    assert "gpipe" not in {c.schedule for c in line_up(deep, COSTS, 1)}

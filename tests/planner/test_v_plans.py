"""Plans of a V: the first stage holds both ends, and loop and V are ranked by time among those that fit."""

from __future__ import annotations

import pytest

from megatron.arguments.parser import parse
from megatron.models import registry
from megatron.planner.estimate import Planner
from megatron.planner.layout import Layout, config_of, flags
from megatron.planner.machine import device
from megatron.planner.search import Search, search

WORDS = "--num-layers 14 --hidden-size 1024 --num-attention-heads 16 --vocab-size 50304 --seq-length 1024 --bf16"
CONFIG = parse([*WORDS.split(), "--dry-run"], world_size=1, env={}, family="gpt2")
H100 = device("h100-80g")
PLANNER = Planner(CONFIG, H100)
PLAIN = {"pipe": 4, "num_micro_batches": 32}
ZB_V = Layout(**PLAIN, schedule="zb-v", chunks=2)


def test_the_first_stage_of_a_v_holds_both_ends() -> None:
    plain, in_a_v = Layout(**PLAIN), ZB_V
    loop, v = (PLANNER.memory(layout) for layout in (plain, in_a_v))
    assert [stage.logits > 0 for stage in loop] == [False, False, False, True]
    assert [stage.logits > 0 for stage in v] == [True, False, False, False]
    held = PLANNER.costs.stage_parameters(PLANNER.bounds(in_a_v), 1, 4, "v")
    assert sum(held) == PLANNER.costs.num_parameters, "the table is there once: no stage has a copy"
    assert sum(PLANNER.costs.stage_parameters(PLANNER.bounds(plain))) > sum(held)


def test_layers_are_cut_by_what_a_stage_of_a_v_holds() -> None:
    bounds = PLANNER.bounds(ZB_V)
    pieces = PLANNER.costs.piece_costs(bounds)
    stages = [pieces[stage] + pieces[7 - stage] for stage in range(4)]
    assert max(stages) <= min(stages) * 1.5 and len(bounds) == 9


def test_zb_v_waits_less_and_holds_no_more_in_flight_than_1f1b() -> None:
    one, other = PLANNER.estimate(Layout(**PLAIN)), PLANNER.estimate(ZB_V)
    assert other.bubble < one.bubble
    assert other.traffic["pipeline"].bytes == pytest.approx(2 * one.traffic["pipeline"].bytes)


def test_the_search_takes_a_v_where_it_is_fastest_and_spells_it() -> None:
    fixed = {"pipe": 4, "tensor": 1, "zero_stage": 0, "recompute": "none", "micro_batch_size": 1}
    found = search(PLANNER, Search(world_size=4, global_batch_size=16, number=1, fixed=fixed))
    (best,) = found.best
    times = {
        name: PLANNER.estimate(Layout(pipe=4, num_micro_batches=16, schedule=name, chunks=chunks)).step_s
        for name, chunks in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-h1", 2), ("zb-v", 2), ("dualpipev", 2))
    }
    assert best.step_s <= min(times.values()) * 1.01
    words = flags(CONFIG, ZB_V)
    assert words[words.index("--pipeline-schedule") + 1] == "zb-v" and "--pipeline-chunks" not in words
    parallel = config_of(CONFIG, ZB_V).parallel
    assert (parallel.chunks, parallel.placement) == (2, "v")
    assert registry.bounds_of(config_of(CONFIG, ZB_V), 4) == PLANNER.bounds(ZB_V)

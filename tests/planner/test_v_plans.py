"""Plans of a V: the first stage holds both ends, and loop and V are ranked by time among those that fit."""

from __future__ import annotations

import pytest

from megatron.arguments.parser import parse
from megatron.models import registry
from megatron.planner.estimate import Planner
from megatron.planner.layout import Layout, script_flags, with_layout
from megatron.planner.machine import gpu_machine
from megatron.planner.search import SearchSpec, search

BASE_FLAGS = "--num-layers 14 --hidden-size 1024 --num-attention-heads 16 --vocab-size 50304 --seq-length 1024 --bf16"
CONFIG = parse([*BASE_FLAGS.split(), "--dry-run"], world_size=1, env={}, family="gpt2")
H100 = gpu_machine("h100-80g")
PLANNER = Planner(CONFIG, H100)
PLAIN_LAYOUT = {"pipe": 4, "num_micro_batches": 32}
ZB_V = Layout(**PLAIN_LAYOUT, schedule="zb-v", chunks=2)


def test_first_v_stage_has_embedding_and_head() -> None:
    plain, v_layout = Layout(**PLAIN_LAYOUT), ZB_V
    loop, v = (PLANNER.memory(layout) for layout in (plain, v_layout))
    assert [stage.logits > 0 for stage in loop] == [False, False, False, True]
    assert [stage.logits > 0 for stage in v] == [True, False, False, False]
    stage_params = PLANNER.costs.stage_parameters(PLANNER.bounds(v_layout), 1, 4, "v")
    assert sum(stage_params) == PLANNER.costs.num_parameters, "the table is there once: no stage has a copy"
    assert sum(PLANNER.costs.stage_parameters(PLANNER.bounds(plain))) > sum(stage_params)


def test_v_stages_are_balanced() -> None:
    bounds = PLANNER.bounds(ZB_V)
    chunk_costs = PLANNER.costs.chunk_costs(bounds)
    stages = [chunk_costs[stage] + chunk_costs[7 - stage] for stage in range(4)]
    assert max(stages) <= min(stages) * 1.5 and len(bounds) == 9


def test_zb_v_has_smaller_bubble_than_1f1b() -> None:
    loop, v = PLANNER.estimate(Layout(**PLAIN_LAYOUT)), PLANNER.estimate(ZB_V)
    assert v.bubble < loop.bubble
    assert v.traffic["pipeline"].bytes == pytest.approx(2 * loop.traffic["pipeline"].bytes)


def test_search_selects_v_and_flags_name_it() -> None:
    fixed = {"pipe": 4, "tensor": 1, "zero_stage": 0, "recompute": "none", "micro_batch_size": 1}
    result = search(PLANNER, SearchSpec(world_size=4, global_batch_size=16, num_layouts=1, fixed=fixed))
    (best,) = result.best
    times = {
        name: PLANNER.estimate(Layout(pipe=4, num_micro_batches=16, schedule=name, chunks=chunks)).step_s
        for name, chunks in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-h1", 2), ("zb-v", 2), ("dualpipev", 2))
    }
    assert best.step_s <= min(times.values()) * 1.01
    words = script_flags(CONFIG, ZB_V)
    assert words[words.index("--pipeline-schedule") + 1] == "zb-v" and "--pipeline-chunks" not in words
    parallel = with_layout(CONFIG, ZB_V).parallel
    assert (parallel.chunks, parallel.placement) == (2, "v")
    assert registry.bounds_of(with_layout(CONFIG, ZB_V), 4) == PLANNER.bounds(ZB_V)

"""Plans of models with experts: on which ranks they lie, what a step sends for them, and what fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.arguments import config_from_values
from megatron.config import Config, parse
from megatron.costs.memory import State
from megatron.log import human_count
from megatron.mpu.topology import Topology
from megatron.planner.estimate import DATA, EXPERT, Planner
from megatron.planner.layout import Layout, layout_of, problems
from megatron.planner.machine import Link, device
from megatron.planner.report import together
from megatron.planner.search import Search, candidates, changes, least_bytes, lower_bound, remedies, search
from megatron.planner.time_model import Traffic
from megatron.training.dry_run import plan_rows
from tests.planner.ranking import check_ranking

H100 = replace(device("h100-80g"), intra=Link.of(100e9, 1e-6), inter=Link.of(10e9, 1e-5))
L, H, S, E, K, F = 4, 1024, 512, 8, 2, 2048
SIZES = {
    "num_layers": L, "hidden_size": H, "num_attention_heads": 16, "seq_length": S, "max_position_embeddings": S,
    "vocab_size": 8192, "num_experts": E, "moe_router_topk": K, "moe_ffn_hidden_size": F, "moe_layer_freq": "[0,1,1,1]",
}  # fmt: skip
EXPERTS = 3 * E * 3 * H * F
"""Parameters of the experts of the three layers that have them."""


def config(**more: Any) -> Config:
    return config_from_values({**SIZES, **more}, family="llama")


PLANNER = Planner(config(), H100)


def estimate(**how: Any) -> Any:
    return PLANNER.estimate(Layout(**how))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_rows_go_to_the_experts_and_back_in_both_passes(recompute: str) -> None:
    how = {"tensor": 2, "data": 8, "micro_batch_size": 2, "num_micro_batches": 3, "recompute": recompute}
    found, one = estimate(**how, expert=4), estimate(**how)
    rows = 2 * S * K * H * 2
    times = 6 if recompute == "full" else 4
    assert found.traffic[EXPERT].bytes == pytest.approx(3 * 3 * times * 3 / 4 * rows)
    assert found.traffic[EXPERT].seconds == pytest.approx(3 * 3 * times * (2e-6 + 3 / 4 * rows / 100e9)), "in a node"
    across = estimate(**how, expert=8).traffic[EXPERT]
    assert across.seconds == pytest.approx(3 * 3 * times * (3e-5 + 7 / 8 * rows / (8 / 2 * 10e9))), "cards of 4 ranks"
    assert EXPERT not in one.traffic and found.parts[EXPERT] == pytest.approx(found.traffic[EXPERT].seconds)
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    piped = estimate(**{**how, "data": 4, "pipe": 2}, expert=4)
    assert piped.traffic[EXPERT].bytes == pytest.approx(found.traffic[EXPERT].bytes * 2 / 3), "two of the three layers"


def test_whole_experts_see_the_tokens_of_a_tensor_rank() -> None:
    planner = Planner(config(expert_tensor_parallel_size=1, model_parallel_size=2, sequence_parallel=True), H100)
    how: Any = {"tensor": 2, "data": 4, "expert": 4, "sequence_parallel": True}
    whole, cut = planner.estimate(Layout(**how)), estimate(**how)
    assert whole.traffic[EXPERT].bytes == cut.traffic[EXPERT].bytes / 2
    held = planner.model(Layout(**how)).costs.stage_apart([0, L + 3], 2)
    assert held == [EXPERTS // 4] == [2 * PLANNER.model(Layout(**how)).costs.stage_apart([0, L + 3], 2)[0]]
    found = list(candidates(planner, Search(world_size=8, global_batch_size=8)))
    assert all(one.sequence_parallel for one in found if one.tensor > 1)


@pytest.mark.parametrize(("stage", "of_parameter", "of_expert"), [(0, 8, 8), (1, 4 + 2, 8 + 2)])
def test_gradients_of_experts_are_summed_over_those_that_have_them(
    stage: int, of_parameter: int, of_expert: int
) -> None:
    """Four of eight replicas share experts out: sums of a quarter over two ranks, behind the last backward."""
    rest = PLANNER.costs.num_parameters - EXPERTS
    found = estimate(data=8, expert=4, zero_stage=stage).traffic[DATA]
    assert found.bytes == pytest.approx(7 / 8 * of_parameter * rest + 1 / 2 * of_expert * EXPERTS / 4)
    alone = estimate(data=8, expert=8, zero_stage=stage).traffic[DATA]
    assert alone.bytes == pytest.approx(7 / 8 * of_parameter * rest), "nobody else has them"
    fast = Planner(PLANNER.config, replace(H100, intra=Link.of(1e15, 0.0)))
    shown = fast.estimate(Layout(data=8, expert=4, zero_stage=stage)).traffic[DATA]
    beside = 4 if stage else 8
    assert shown.hidden_s == pytest.approx(7 / 8 * beside * rest / 1e15), "of the rest alone; weights come after all"


def test_products_are_those_of_the_rows_that_come_to_a_rank() -> None:
    for how in ({}, {"tensor": 2}, {"expert": 4, "data": 4}):
        layout = Layout(**how)  # type: ignore[arg-type]
        work = PLANNER.model(layout).costs.unit_work(2, layout.tensor, 2)
        of_experts = [one for one in work[2].products if one.number > 1]
        flops = 2 * (2 * S * K) * 3 * H * F / layout.tensor
        assert sum(one.flops for one in of_experts) == flops
        assert [one.number for one in of_experts] == [E / layout.expert] * 2
        assert not any(one.is_column for one in of_experts), "nothing hides the sum of their input's gradient"
    whole = sum(unit.flops for unit in PLANNER.costs.unit_work(1, 1, 2))
    norms = 6 * (L * 2 * H + H)
    assert whole == pytest.approx(PLANNER.costs.flops_per_sample / 3 - S * norms / 3)


def test_the_update_of_experts_is_shared_by_those_that_have_them() -> None:
    one = replace(H100, update_bandwidth=1e9)
    state = State.of("bf16", "adamw")
    moved = 2 * (state.width + state.optimizer) + 2 * state.gradient
    found = Planner(PLANNER.config, one).estimate(Layout(data=8, expert=4, zero_stage=1))
    number = (PLANNER.costs.num_parameters - EXPERTS) / 8 + EXPERTS / 4 / 2
    assert found.parts["update"] == pytest.approx(number * moved / 1e9)


# What is proposed.


def test_experts_are_sought_on_ranks_that_divide_them() -> None:
    wanted = Search(world_size=12, global_batch_size=24)
    found = list(candidates(Planner(PLANNER.config, replace(H100, memory_bytes=24 * 10**9)), wanted))
    assert len(found) == len(set(found)) and {one.expert for one in found} == {1, 2, 4}
    for one in found:
        assert E % one.expert == 0 and one.data % one.expert == 0 and (one.expert == 1 or one.zero_stage <= 1)
    assert not any(problems(PLANNER.config, one) for one in found[::11])
    assert {one.zero_stage for one in found if one.expert == 1} == {0, 1, 2, 3}
    fixed = candidates(PLANNER, replace(wanted, fixed={"expert": 4}))
    assert {one.expert for one in fixed} == {4}
    muon = Planner(config(optimizer="muon"), H100)
    plain = Layout(optimizer="muon")
    assert not any(problems(muon.config, one) for one in list(candidates(muon, replace(wanted, plain=plain)))[::11])
    dense = Planner(config(num_experts=0), H100)
    assert {one.expert for one in candidates(dense, wanted)} == {1}


def test_the_search_finds_what_trying_every_candidate_finds() -> None:
    planner = Planner(PLANNER.config, replace(H100, memory_bytes=12 * 10**9))
    wanted, usable = Search(world_size=4, global_batch_size=8, number=3), planner.machine.usable_bytes
    every = [planner.estimate(layout) for layout in candidates(planner, wanted)]
    for one in every:
        assert one.step_s >= lower_bound(planner, one.layout) * (1 - 1e-9)
        assert one.most_bytes >= least_bytes(planner, one.layout) * (1 - 1e-9)
    found = search(planner, wanted)
    assert found.best
    check_ranking(found.best, [one for one in every if one.most_bytes <= usable])


def test_changes_share_experts_out_and_keep_what_can_be() -> None:
    found = dict(changes(PLANNER, Layout(data=8, num_micro_batches=2, zero_stage=3)))
    assert found["--expert-model-parallel-size 4 --zero-stage 1"].expert == 4
    assert {one.zero_stage for one in found.values() if one.expert > 1} == {1}
    fewer = dict(changes(PLANNER, Layout(data=4, expert=4, num_micro_batches=2)))
    halved = fewer.get("--pipe-parallel-size 2 --gas 4 --expert-model-parallel-size 2")
    assert halved is not None and (halved.data, halved.expert) == (2, 2)
    assert "--zero-stage 1" in fewer and "--zero-stage 2" not in fewer
    for one in (*found.values(), *fewer.values()):
        if one.tensor == 1 or one.pipe == 1:
            assert not problems(PLANNER.config, one), str(one)
    tight = Planner(PLANNER.config, replace(H100, memory_bytes=9 * 10**9))
    ways = remedies(tight, Layout(data=8, num_micro_batches=2))
    assert ("--expert-model-parallel-size 8",) in {way.changes for way in ways}


def mixtral(gpus: int) -> Any:
    words = (
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 --ff-hidden-size 14336 "
        "--vocab-size 32000 --num-experts 8 --moe-router-topk 2 --seq-length 4096 --bf16 --dry-run"
    )
    planner = Planner(parse(words.split(), world_size=1, env={}, family="llama"), device("h100-80g"))
    fixed = {"recompute": "none", "tensor": 2, "schedule": "1f1b"}
    return search(planner, Search(world_size=gpus, global_batch_size=4 * gpus, number=1, fixed=fixed))


def test_mixtral_needs_more_than_a_node_and_shares_experts_out() -> None:
    """46.7 B parameters of 18 bytes are 841 GB, more than 8 x 80 GB."""
    assert mixtral(8).best == []
    (best,) = mixtral(32).best
    assert best.layout.expert > 1 and 0.3 < best.mfu < 0.6


def test_what_flags_say_of_experts_comes_into_the_layout_and_the_start_table() -> None:
    words = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 101 --num-experts 8 "
        "--moe-ffn-hidden-size 32 --expert-model-parallel-size 2 --zero-stage 1 --data-path none --device cpu"
    )
    asked = parse(words.split(), world_size=4, env={}, family="llama")
    layout = layout_of(asked, 4)
    assert layout == Layout(
        data=4, expert=2, zero_stage=1, micro_batch_size=layout.micro_batch_size, dtype=layout.dtype,
        num_micro_batches=layout.num_micro_batches,
    )  # fmt: skip
    assert "ep 2" in str(layout) and "ep" not in str(Layout(data=4))
    costs = Planner(asked, H100).costs
    shown = dict(plan_rows(asked, Topology.of_world(4, 1, 1, 1, 2), [0, 7], "fp32"))
    total, active = (human_count(number) for number in (costs.num_parameters, costs.num_active_parameters))
    assert shown["model"].startswith(f"{total} parameters in total, {active} active: 4 layers")
    assert shown["ZeRO"].endswith("main params and optimizer states; 2 replicas share those of an expert")
    assert "memory assumes an even load" in shown["experts"]
    assert Planner(asked, H100).estimate(layout).traffic[EXPERT] != Traffic()


def test_a_flag_that_two_changes_set_is_told_once_with_its_last_value() -> None:
    assert together(["--pipe-parallel-size 4 --gas 128", "--pipe-parallel-size 8 --gas 256 --sequence-parallel"]) == (
        "--pipe-parallel-size 8 --gas 256 --sequence-parallel"
    )

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
from megatron.planner.machine import Link, gpu_machine
from megatron.planner.report import merge_flags
from megatron.planner.search import SearchSpec, candidates, changes, lower_bound, min_bytes, remedies, search
from megatron.planner.time_model import Traffic
from megatron.training.dry_run import plan_rows
from tests.planner.ranking import check_ranking

H100 = replace(gpu_machine("h100-80g"), intra=Link.uniform(100e9, 1e-6), inter=Link.uniform(10e9, 1e-5))
L, H, S, E, K, F = 4, 1024, 512, 8, 2, 2048
MODEL_VALUES = {
    "num_layers": L, "hidden_size": H, "num_attention_heads": 16, "seq_length": S, "max_position_embeddings": S,
    "vocab_size": 8192, "num_experts": E, "moe_router_topk": K, "moe_ffn_hidden_size": F, "moe_layer_freq": "[0,1,1,1]",
}  # fmt: skip
EXPERT_PARAMS = 3 * E * 3 * H * F
"""Parameters of the experts of the three layers that have them."""


def make_config(**overrides: Any) -> Config:
    return config_from_values({**MODEL_VALUES, **overrides}, family="llama")


PLANNER = Planner(make_config(), H100)


def estimate_layout(**kwargs: Any) -> Any:
    return PLANNER.estimate(Layout(**kwargs))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_expert_traffic_counts_both_passes(recompute: str) -> None:
    layout_kwargs = {"tensor": 2, "data": 8, "micro_batch_size": 2, "num_micro_batches": 3, "recompute": recompute}
    result, replicated = estimate_layout(**layout_kwargs, expert=4), estimate_layout(**layout_kwargs)
    row_bytes = 2 * S * K * H * 2
    num_exchanges = 6 if recompute == "full" else 4
    assert result.traffic[EXPERT].bytes == pytest.approx(3 * 3 * num_exchanges * 3 / 4 * row_bytes)
    assert result.traffic[EXPERT].seconds == pytest.approx(
        3 * 3 * num_exchanges * (2e-6 + 3 / 4 * row_bytes / 100e9)
    ), "in a node"
    inter_node = estimate_layout(**layout_kwargs, expert=8).traffic[EXPERT]
    assert inter_node.seconds == pytest.approx(3 * 3 * num_exchanges * (3e-5 + 7 / 8 * row_bytes / (8 / 2 * 10e9))), (
        "cards of 4 ranks"
    )
    assert EXPERT not in replicated.traffic
    assert result.seconds_by_activity[EXPERT] == pytest.approx(result.traffic[EXPERT].seconds)
    assert sum(result.seconds_by_activity.values()) == pytest.approx(result.step_s)
    pipelined = estimate_layout(**{**layout_kwargs, "data": 4, "pipe": 2}, expert=4)
    assert pipelined.traffic[EXPERT].bytes == pytest.approx(result.traffic[EXPERT].bytes * 2 / 3), (
        "two of the three layers"
    )


def test_unsharded_experts_process_tensor_rank_tokens() -> None:
    planner = Planner(make_config(expert_tensor_parallel_size=1, model_parallel_size=2, sequence_parallel=True), H100)
    layout_kwargs: Any = {"tensor": 2, "data": 4, "expert": 4, "sequence_parallel": True}
    unsharded = planner.estimate(Layout(**layout_kwargs, expert_tensor=1))
    sharded = estimate_layout(**layout_kwargs)
    assert unsharded.traffic[EXPERT].bytes == sharded.traffic[EXPERT].bytes / 2
    expert_params = planner.model(Layout(**layout_kwargs)).costs.stage_distributed_parameters([0, L + 3], 2)
    assert (
        expert_params
        == [EXPERT_PARAMS // 4]
        == [2 * PLANNER.model(Layout(**layout_kwargs)).costs.stage_distributed_parameters([0, L + 3], 2)[0]]
    )
    layouts = list(candidates(planner, SearchSpec(world_size=8, global_batch_size=8)))
    assert all(layout.sequence_parallel for layout in layouts if layout.tensor > 1)


@pytest.mark.parametrize(
    ("stage", "param_bytes", "expert_bytes"),
    [(0, 8, 8), (1, 4 + 2, 8 + 2), (2, 4 + 2, 4 + 2), (3, 4 + 2 * 2, 4 + 2 * 2)],
)
def test_expert_grads_are_reduced_over_expert_replicas(stage: int, param_bytes: int, expert_bytes: int) -> None:
    """Four of eight replicas share experts out: sums of a quarter over two ranks, behind the last backward."""
    dense_params = PLANNER.costs.num_parameters - EXPERT_PARAMS
    traffic = estimate_layout(data=8, expert=4, zero_stage=stage).traffic[DATA]
    assert traffic.bytes == pytest.approx(7 / 8 * param_bytes * dense_params + 1 / 2 * expert_bytes * EXPERT_PARAMS / 4)
    unreplicated = estimate_layout(data=8, expert=8, zero_stage=stage).traffic[DATA]
    assert unreplicated.bytes == pytest.approx(7 / 8 * param_bytes * dense_params), "nobody else has them"
    fast_planner = Planner(PLANNER.config, replace(H100, intra=Link.uniform(1e15, 0.0)))
    fast_traffic = fast_planner.estimate(Layout(data=8, expert=4, zero_stage=stage)).traffic[DATA]
    hidden_bytes = {0: 8, 1: 4, 2: 4, 3: 4 + 2 * 2}[stage]
    expert_hidden_bytes = {0: 0, 1: 0, 2: 4, 3: 4 + 2 * 2}[stage]
    expected_bytes = 7 / 8 * hidden_bytes * dense_params + 1 / 2 * expert_hidden_bytes * EXPERT_PARAMS / 4
    assert fast_traffic.hidden_s == pytest.approx(expected_bytes / 1e15), "updated weights are gathered after the step"


def test_expert_products_match_rows_per_rank() -> None:
    for layout_kwargs in ({}, {"tensor": 2}, {"expert": 4, "data": 4}):
        layout = Layout(**layout_kwargs)  # type: ignore[arg-type]
        work = PLANNER.model(layout).costs.unit_work(2, layout.tensor, 2)
        expert_products = [product for product in work[2].products if product.count > 1]
        flops = 2 * (2 * S * K) * 3 * H * F / layout.tensor
        assert sum(product.flops for product in expert_products) == flops
        assert [product.count for product in expert_products] == [E / layout.expert] * 2
        assert not any(product.is_column for product in expert_products), (
            "nothing hides the sum of their input's gradient"
        )
    total_flops = sum(unit.flops for unit in PLANNER.costs.unit_work(1, 1, 2))
    norm_flops = 6 * (L * 2 * H + H)
    assert total_flops == pytest.approx(PLANNER.costs.flops_per_sample / 3 - S * norm_flops / 3)


def test_expert_update_is_sharded_over_replicas() -> None:
    machine = replace(H100, update_bandwidth=1e9)
    state = State.for_optimizer("bf16", "adamw")
    bytes_per_param = 2 * (state.width + state.optimizer) + 2 * state.gradient
    result = Planner(PLANNER.config, machine).estimate(Layout(data=8, expert=4, zero_stage=1))
    num_params = (PLANNER.costs.num_parameters - EXPERT_PARAMS) / 8 + EXPERT_PARAMS / 4 / 2
    assert result.seconds_by_activity["update"] == pytest.approx(num_params * bytes_per_param / 1e9)


# What is proposed.


def test_candidates_split_experts_evenly() -> None:
    request = SearchSpec(world_size=12, global_batch_size=24)
    layouts = list(candidates(Planner(PLANNER.config, replace(H100, memory_bytes=24 * 10**9)), request))
    assert len(layouts) == len(set(layouts)) and {layout.expert for layout in layouts} == {1, 2, 4}
    for layout in layouts:
        assert E % layout.expert == 0 and layout.data % layout.expert == 0
    assert not any(problems(PLANNER.config, layout) for layout in layouts[::11])
    for expert in (1, 2, 4):
        assert {layout.zero_stage for layout in layouts if layout.expert == expert} == {0, 1, 2, 3}
    fixed_layouts = candidates(PLANNER, replace(request, fixed={"expert": 4}))
    assert {layout.expert for layout in fixed_layouts} == {4}
    muon_planner = Planner(make_config(optimizer="muon"), H100)
    base_layout = Layout(optimizer="muon")
    assert not any(
        problems(muon_planner.config, layout)
        for layout in list(candidates(muon_planner, replace(request, base_layout=base_layout)))[::11]
    )
    dense_planner = Planner(make_config(num_experts=0), H100)
    assert {layout.expert for layout in candidates(dense_planner, request)} == {1}


def test_candidates_do_not_split_unsharded_experts() -> None:
    """With --expert-tensor-parallel-size 1, the tensor size need not divide the width of an expert."""
    planner = Planner(make_config(expert_tensor_parallel_size=1, moe_ffn_hidden_size=2049), H100)
    layouts = list(candidates(planner, SearchSpec(world_size=4, global_batch_size=8)))
    assert {layout.tensor for layout in layouts} == {1, 2, 4}
    for layout in layouts[::11]:
        assert not problems(planner.config, layout)
        assert planner.estimate(layout).max_bytes >= min_bytes(planner, layout) * (1 - 1e-9)


def test_search_matches_exhaustive_search() -> None:
    planner = Planner(PLANNER.config, replace(H100, memory_bytes=12 * 10**9))
    request, usable_bytes = SearchSpec(world_size=4, global_batch_size=8, num_layouts=3), planner.machine.usable_bytes
    estimates = [planner.estimate(layout) for layout in candidates(planner, request)]
    for candidate in estimates:
        assert candidate.step_s >= lower_bound(planner, candidate.layout) * (1 - 1e-9)
        assert candidate.max_bytes >= min_bytes(planner, candidate.layout) * (1 - 1e-9)
    result = search(planner, request)
    assert result.best
    check_ranking(result.best, [candidate for candidate in estimates if candidate.max_bytes <= usable_bytes])


def test_changes_propose_valid_expert_layouts() -> None:
    proposals = dict(changes(PLANNER, Layout(data=8, num_micro_batches=2, zero_stage=3)))
    assert proposals["--expert-model-parallel-size 4"].expert == 4
    assert {layout.zero_stage for layout in proposals.values() if layout.expert > 1} == {3}
    fewer_proposals = dict(changes(PLANNER, Layout(data=4, expert=4, num_micro_batches=2)))
    halved = fewer_proposals.get("--pipe-parallel-size 2 --gas 4 --expert-model-parallel-size 2")
    assert halved is not None and (halved.data, halved.expert) == (2, 2)
    assert {f"--zero-stage {stage}" for stage in (1, 2, 3)} <= set(fewer_proposals)
    for layout in (*proposals.values(), *fewer_proposals.values()):
        if layout.tensor == 1 or layout.pipe == 1:
            assert not problems(PLANNER.config, layout), str(layout)
    tight_planner = Planner(PLANNER.config, replace(H100, memory_bytes=9 * 10**9))
    fixes = remedies(tight_planner, Layout(data=8, num_micro_batches=2))
    assert ("--expert-model-parallel-size 8",) in {fix.changes for fix in fixes}


def search_mixtral(gpus: int) -> Any:
    words = (
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 --ff-hidden-size 14336 "
        "--vocab-size 32000 --num-experts 8 --moe-router-topk 2 --seq-length 4096 --bf16 --dry-run"
    )
    planner = Planner(parse(words.split(), world_size=1, env={}, family="llama"), gpu_machine("h100-80g"))
    fixed = {"recompute": "none", "tensor": 2, "schedule": "1f1b"}
    return search(planner, SearchSpec(world_size=gpus, global_batch_size=4 * gpus, num_layouts=1, fixed=fixed))


def test_mixtral_needs_multiple_nodes_and_expert_parallelism() -> None:
    """46.7 B parameters of 18 bytes are 841 GB, more than 8 x 80 GB."""
    assert search_mixtral(8).best == []
    (best,) = search_mixtral(32).best
    assert best.layout.expert > 1 and 0.3 < best.mfu < 0.6


def test_expert_flags_reach_layout_and_start_table() -> None:
    words = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 101 --num-experts 8 "
        "--moe-ffn-hidden-size 32 --expert-model-parallel-size 2 --zero-stage 1 --data-path none --device cpu"
    )
    parsed = parse(words.split(), world_size=4, env={}, family="llama")
    layout = layout_of(parsed, 4)
    assert layout == Layout(
        data=4, expert=2, zero_stage=1, micro_batch_size=layout.micro_batch_size, dtype=layout.dtype,
        num_micro_batches=layout.num_micro_batches,
    )  # fmt: skip
    assert "ep 2" in str(layout) and "ep" not in str(Layout(data=4))
    costs = Planner(parsed, H100).costs
    rows = dict(plan_rows(parsed, Topology.from_world_size(4, 1, 1, 1, 2), [0, 7], "fp32"))
    total, active = (human_count(count) for count in (costs.num_parameters, costs.num_active_parameters))
    assert rows["model"].startswith(f"{total} parameters in total, {active} active: 4 layers")
    assert rows["ZeRO"].endswith("main params and optimizer states; 2 replicas share those of each expert")
    assert "memory assumes an even load" in rows["experts"]
    assert Planner(parsed, H100).estimate(layout).traffic[EXPERT] != Traffic()


def test_combined_changes_use_last_flag_value() -> None:
    assert merge_flags(
        ["--pipe-parallel-size 4 --gas 128", "--pipe-parallel-size 8 --gas 256 --sequence-parallel"]
    ) == ("--pipe-parallel-size 8 --gas 256 --sequence-parallel")

"""Costs of hybrid decoders: parameters of the built model, FLOPs by hand, saved and exchanged bytes as measured."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from megatron.config import ModelConfig, parse
from megatron.config.layer_types import GATED_DELTA_NET, KIMI_DELTA, MAMBA2
from megatron.costs.decoder_cost import DecoderCosts
from megatron.costs.recurrent_cost import CHUNK_SIZE, COSTS
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import model_args_from
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.recurrent_mixers import MIXERS, make_recurrent_mixer
from megatron.models.registry import costs_of
from megatron.mpu.groups import Group, build_grid
from megatron.mpu.topology import Topology
from megatron.ops.delta_rule import gated_delta_rule
from megatron.ops.state_space import state_space_scan
from megatron.planner.layout import Layout
from megatron.planner.machine import gpu_machine
from megatron.planner.time_model import CommunicationModel
from megatron.training.dry_run import layer_counts_text, plan_rows
from tests.helpers.count_bytes import count_saved_bytes, count_sent_bytes
from tests.helpers.harness import run_ranks
from tests.models.common.test_features import MODEL_FIELDS

LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
}  # fmt: skip
KIMI: dict[str, Any] = {
    "experimental_attention_variant": "kimi_delta", **LINEAR, "linear_num_key_heads": 4, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA: dict[str, Any] = {"mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_state_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "gated delta net": {"experimental_attention_variant": "gated_delta_net", **LINEAR},
    "gated delta net, one of two": {
        "experimental_attention_variant": "gated_delta_net", **LINEAR, "linear_attention_freq": "2",
        "norm_placement": "after", "linear_norm_placement": "both",
    },
    "kimi": KIMI,
    "kimi, full rank": {**KIMI, "linear_full_rank_gates": True},
    "mamba": {"experimental_attention_variant": "mamba2", **MAMBA},
    "mamba, biases": {
        "experimental_attention_variant": "mamba2", **MAMBA, "mamba_proj_bias": True, "mamba_conv_bias": False,
        "mamba_norm": "none",
    },
    "mamba, one group": {"experimental_attention_variant": "mamba2", **MAMBA, "mamba_num_groups": 1},
    "gated delta net, published heads": {
        "experimental_attention_variant": "gated_delta_net", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "kimi, published heads": {
        "experimental_attention_variant": "kimi_delta", "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "mamba, published heads": {
        "experimental_attention_variant": "mamba2", "mamba_num_heads": 8, "mamba_head_dim": 64, "mamba_num_groups": 1,
        "mamba_state_dim": 128,
    },
    "parallel heads": {"experimental_attention_variant": "parallel_mamba2", **MAMBA},
    "pattern": {"num_layers": 6, "hybrid_layer_pattern": "M-*EG-", **LINEAR, **MAMBA, "num_experts": 4,
                "norm_placement": "both"},
}  # fmt: skip
WIDTHS = {torch.float32: 4, torch.bfloat16: 2}
LENGTH, BATCH = 128, 2


def model_config(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**MODEL_FIELDS, "vocab_size": 24, **changes})


@pytest.mark.parametrize("name", MODELS)
def test_parameter_count_matches_model(name: str) -> None:
    config = model_config(**MODELS[name])
    for tensor in (1, 2):
        model = DecoderModel(model_args_from(config), ParallelContext(Group(tuple(range(tensor)), 0)))
        num_built = sum(parameter.numel() for parameter in model.parameters())
        costs = DecoderCosts(config, 7)
        assert costs.stage_parameters([0, costs.num_units], tensor) == [num_built]
        by_layer = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model.layers]
        assert costs.unit_parameters(tensor)[1 : 1 + config.num_layers] == by_layer


def test_every_mixer_has_costs_and_the_chunk_size_of_its_operator() -> None:
    assert COSTS.keys() == MIXERS.keys()
    for function in (gated_delta_rule, state_space_scan):
        assert inspect.signature(function).parameters["chunk_size"].default == CHUNK_SIZE


def test_flops_match_count_by_hand() -> None:
    """As in Megatron-LM: 8 a d_k d_v per token for the delta rule, 7 a d n for Mamba-2, and no scores."""
    h, head = 12, 24 * 12
    costs = DecoderCosts(model_config(**MODELS["gated delta net"], num_layers=1), 1000)
    weights = costs.layer_parameters() + costs.norm_parameters + head
    assert costs.flops_per_token() == 6 * weights + 3 * 8 * 4 * 16 * 8
    projections = h * (2 * 2 * 16 + 2 * 4 * 8 + 2 * 4) + 4 * 8 * h
    small = 4 * (2 * 2 * 16 + 4 * 8) + 2 * 4 + 8  # convolution, A_log and dt_bias, output norm
    assert costs.layer_parameters() == projections + small + 2 * h * 10 + 4 * h
    mamba = DecoderCosts(model_config(**MODELS["mamba"], num_layers=1), 1000)
    weights = mamba.layer_parameters() + mamba.norm_parameters + head
    assert mamba.flops_per_token() == 6 * weights + 3 * 7 * 4 * 16 * 8
    lengths = [DecoderCosts(model_config(**MODELS["gated delta net"]), s).flops_per_token() for s in (64, 8192)]
    assert lengths[0] == lengths[1]


def test_cost_of_a_recurrent_layer_includes_its_chunks() -> None:
    """Per token and head in chunks of 64: products of keys and queries, values, the triangular system, the state."""
    costs = DecoderCosts(model_config(num_layers=2, hybrid_layer_pattern="G-", **LINEAR), 1000)
    key, value, chunk = 16, 8, 64
    core = 4 * (4 * chunk * key + 2 * chunk * value + chunk * (key + value) + 6 * key * value)
    projections = 2 * 12 * (2 * 2 * key + 2 * 4 * value + 2 * 4) + 2 * 12 * 4 * value
    assert costs.unit_costs[1] == 1.0
    assert costs.unit_costs[2] == pytest.approx(4 * 12 * 10 / (core + projections))


def test_only_attention_layers_have_scores() -> None:
    costs = DecoderCosts(model_config(**MODELS["pattern"]), 100)
    assert [bool(keys) for keys in costs.visible_keys_by_layer] == [False, False, True, False, False, False]
    assert costs.flops_per_token(causal=False) - costs.flops_per_token() == 12 * 24 * 50


def saved_by_mixer(mixer: str, dtype: torch.dtype, *, is_selective: bool, **changes: Any) -> int:
    """Return the bytes that a mixer saves in one forward pass, without its input."""
    args = model_args_from(model_config(**changes), recompute_attention=is_selective)
    module = make_recurrent_mixer(mixer, args, ParallelContext(), 0).to(dtype)
    x = torch.randn(LENGTH, BATCH, args.hidden_size).to(dtype).requires_grad_()
    with count_saved_bytes(module) as saved:
        y = module(x)
    del y
    return sum(saved.values()) - x.nbytes


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize(
    ("mixer", "name"),
    [
        (GATED_DELTA_NET, "gated delta net"), (KIMI_DELTA, "kimi"), (KIMI_DELTA, "kimi, full rank"), (MAMBA2, "mamba"),
        (MAMBA2, "mamba, biases"), (MAMBA2, "mamba, one group"), (GATED_DELTA_NET, "gated delta net, published heads"),
        (KIMI_DELTA, "kimi, published heads"), (MAMBA2, "mamba, published heads"),
    ],
)  # fmt: skip
def test_saved_bytes_match_estimate(mixer: str, name: str, dtype: torch.dtype) -> None:
    costs = COSTS[mixer](model_config(**MODELS[name]))
    total, core = costs.saved_bytes(LENGTH * BATCH, 1, WIDTHS[dtype])
    plain, selective = (
        saved_by_mixer(mixer, dtype, is_selective=is_selective, **MODELS[name]) for is_selective in (False, True)
    )
    assert abs(total - plain) <= 0.05 * plain, (total, plain)
    assert abs(core - (plain - selective)) <= 0.05 * plain, (core, plain - selective)


def sent_by_layer(rank: int, changes: dict[str, Any]) -> float:
    """Return the bytes that the first layer on this rank sends over the context group in forward and backward."""
    grid = build_grid(Topology(pipe=1, data=1, tensor=1, context=2), rank)
    parallel = ParallelContext(context=grid.context)
    model = DecoderModel(model_args_from(model_config(**changes)), parallel)
    x = torch.randn(LENGTH // 2, BATCH, 12, requires_grad=True)
    with count_sent_bytes(2) as sent:
        model.layers[0](x, None, None, None, None).sum().backward()
    return sum(sent)


@pytest.mark.parametrize("name", ["gated delta net", "kimi", "mamba"])
def test_layer_traffic_matches_planner(name: str) -> None:
    costs = DecoderCosts(model_config(**MODELS[name]), LENGTH, context=2)
    layout = Layout(context=2, micro_batch_size=BATCH, dtype="fp32")
    expected = CommunicationModel(costs, gpu_machine("h100-80g")).context_traffic(layout, 1).bytes
    assert run_ranks(2, sent_by_layer, MODELS[name]) == [expected] * 2


def test_pipeline_stages_are_balanced_by_layer_type() -> None:
    """A feed-forward half costs less than a recurrent mixer, so a stage of such halves has more layers."""
    costs = DecoderCosts(model_config(num_layers=8, hybrid_layer_pattern="MMM-----", **MAMBA), 64)
    mamba, *_, mlp = costs.unit_costs[1:9]
    assert mamba == 1.0 and mlp < 0.1
    assert costs.stage_bounds(2) == [0, 3, 11]


def test_selective_recomputation_saves_the_core_of_recurrent_layers() -> None:
    costs = DecoderCosts(model_config(**MODELS["gated delta net"]), LENGTH)
    options: dict[str, Any] = {"micro_batch_size": BATCH, "dtype": "bf16"}
    plain, selective = (
        costs.memory_per_stage([0, costs.num_units], **options, is_selective=is_selective)[0].activations
        for is_selective in (False, True)
    )
    core = COSTS[GATED_DELTA_NET](costs.model).saved_bytes(LENGTH * BATCH, 1, 2)[1]
    assert plain - selective == 2 * core - core  # of two layers, one core at a time is recomputed


def test_plan_lists_layer_types_by_stage() -> None:
    flags = (
        "--hybrid-layer-pattern M-*M --mamba-head-dim 8 --mamba-num-groups 2 --hidden-size 16 --num-attention-heads 4 "
        "--vocab-size 64 --pipe-parallel-size 2 --data-path none"
    )
    config = parse(flags.split(), world_size=2, env={})
    topology = Topology.from_world_size(2, 1, 2, 1)
    rows = dict(plan_rows(config, topology, costs_of(config).stage_bounds(2), "fp32"))
    assert rows["layers"] == "2 mamba2, 1 mlp, 1 attention"
    assert all("mamba2" in rows[f"stage {stage}"] for stage in (0, 1))
    assert layer_counts_text(()) == ""
    plain = parse("--num-layers 2 --vocab-size 64 --data-path none".split(), world_size=1, env={})
    assert "layers" not in dict(plan_rows(plain, Topology.from_world_size(1, 1, 1, 1), [0, 5], "fp32"))

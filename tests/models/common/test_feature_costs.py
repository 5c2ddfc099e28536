"""Costs of every feature of a decoder: parameters of the model that is built, scores within windows, what is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.config import ModelConfig, parse
from megatron.costs.decoder_cost import DecoderCosts, mask_reason
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import model_args_from
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.registry import costs_of
from megatron.mpu.groups import Group
from tests.models.common.test_features import FEATURES, FULL_MODELS, MODEL_FIELDS

FEATURE_SETTINGS: dict[str, dict[str, Any]] = {**FEATURES, **FULL_MODELS}


def make_costs(length: int = 7, **changes: Any) -> DecoderCosts:
    """Return the costs of a small model with these settings."""
    return DecoderCosts(ModelConfig(**{**MODEL_FIELDS, **changes}), length)


@pytest.mark.parametrize("name", FEATURE_SETTINGS)
def test_parameter_count_matches_model_with_every_feature(name: str) -> None:
    model_config = ModelConfig(**{**MODEL_FIELDS, "vocab_size": 24, **FEATURE_SETTINGS[name]})
    for tensor in (1, 2) if model_config.num_query_groups > 1 else (1,):
        model = DecoderModel(model_args_from(model_config), ParallelContext(Group(tuple(range(tensor)), 0)))
        num_built = sum(parameter.numel() for parameter in model.parameters())
        assert DecoderCosts(model_config, 7).stage_parameters([0, 5], tensor) == [num_built]


def test_window_flops_count_scores_within_window() -> None:
    """On average w - w^2 / 2s keys of each query with w in its window, of s: half of s where all are."""
    full, plain = make_costs(100), 12 * 2 * 24 * 100  # both layers, all heads together have 24 numbers
    assert full.flops_per_token(causal=False) - full.flops_per_token() == plain / 2
    for window, keys in ((9, 10 - 0.5), (49, 50 - 12.5), (99, 50), (1000, 50)):
        costs = make_costs(100, window_size=window)
        assert full.flops_per_token() - costs.flops_per_token() == pytest.approx(12 * 2 * 24 * (50 - keys))
    half = make_costs(100, window_size=9, window_attn_skip_freq="2")
    assert full.flops_per_token() - half.flops_per_token() == pytest.approx(12 * 24 * (50 - 9.5))
    assert half.unit_costs[2] == 1.0 > half.unit_costs[1] and full.unit_costs[1:3] == [1.0, 1.0]


def test_features_add_their_saved_activations() -> None:
    """In bytes of a token, beside those of a plain decoder: inputs of norms, queries and keys before they change."""
    width, tokens, h, query_key_width = 4, 2 * 7, 12, 24 + 24
    plain = make_costs()

    def extra_bytes(**changes: Any) -> int:
        return (
            make_costs(**changes).unit_saved_bytes(2, 1, width)[1].full - plain.unit_saved_bytes(2, 1, width)[1].full
        ) // tokens

    assert extra_bytes(position_embedding_type="rope") == query_key_width * width
    assert extra_bytes(position_embedding_type="rope", qk_norm="head") == 2 * query_key_width * width
    assert extra_bytes(norm_placement="both") == 2 * h * width and extra_bytes(norm_placement="after") == 0
    assert extra_bytes(num_query_groups=2) == -2 * 12 * width
    assert extra_bytes(parallel_residual="separate-norms") == -h * width
    assert extra_bytes(parallel_residual="shared-norm") == -2 * h * width
    assert extra_bytes(v_head_dim=4) == 4 * 4 * width, "the context, in addition to four padded tensors"
    assert extra_bytes(v_head_dim=9) == 4 * 4 * (9 - 6) * width
    assert extra_bytes(attention_output_gate=True) == 2 * 24 * width and extra_bytes(softmax_type="learnable") == 0
    gated = {"activation": "gated-silu"}
    clamped = extra_bytes(**gated, activation_func_clamp_value=1.0) - extra_bytes(**gated)
    assert clamped == 2 * 10 * width and extra_bytes(**gated, glu_linear_offset=1.0) == extra_bytes(**gated)
    rope = {"position_embedding_type": "rope", "no_rope_freq": "[0,1]"}
    first, second = (layer.full for layer in make_costs(**rope).unit_saved_bytes(2, 1, width)[1:3])
    assert first - second == tokens * query_key_width * width
    embedding = [
        make_costs(embed_layernorm=has_norm).unit_saved_bytes(2, 1, width)[0].full for has_norm in (False, True)
    ]
    assert embedding[1] - embedding[0] == tokens * h * width


def test_stage_saves_one_window_mask() -> None:
    settings: dict[str, Any] = {"micro_batch_size": 2, "dtype": "bf16"}
    bounds = [0, 5]
    plain, window = (make_costs(window_size=n).memory_per_stage(bounds, **settings)[0].activations for n in (0, 3))
    assert window - plain == 7 * 7
    wide = make_costs(window_size=6).memory_per_stage(bounds, **settings)[0].activations
    assert wide == plain, "a window that leaves nothing out has no mask"


def test_capped_logits_save_one_more_logits_tensor() -> None:
    costs = [make_costs(final_logit_softcapping=cap, loss_chunk_tokens=0) for cap in (0.0, 2.0)]
    assert costs[1].loss_bytes(2, 1, 4, forwards=3) - costs[0].loss_bytes(2, 1, 4, forwards=3) == 3 * 14 * 23 * 4


@pytest.mark.parametrize("family", ["gpt2", "t5", "bert"])
@pytest.mark.parametrize(
    ("flags", "is_on_cpu", "has_kernels"),
    [("", False, True), ("", True, False), ("--fused-kernels torch", False, False), ("--device cpu", False, False)],
)
def test_memory_of_loss_depends_on_kernels(family: str, flags: str, is_on_cpu: bool, has_kernels: bool) -> None:
    config = parse([*flags.split(), "--vocab-size", "900"], world_size=1, env={}, family=family)
    costs: Any = costs_of(config, is_on_cpu=is_on_cpu)
    assert costs.has_loss_kernels == has_kernels
    num_bytes, without_kernels = costs.loss_bytes(1, 1, 2), replace(costs, has_loss_kernels=False).loss_bytes(1, 1, 2)
    # logits and their gradient in bf16; otherwise logits in bf16 and fp32, and the fp32 softmax
    assert num_bytes * 10 == without_kernels * (4 if has_kernels else 10)


def test_only_plain_attention_is_blocked() -> None:
    for flags, is_blocked in (
        ("", True),
        ("--window-size 3", False),
        ("--qk-layernorm", False),
        ("--clip-qkv 6", False),
        ("--softmax-type off-by-one", False),
        ("--attention-output-gate", False),
    ):
        config = parse([*flags.split(), "--attention-dropout", "0", "--vocab-size", "9"], world_size=1, env={})
        assert costs_of(config, is_on_cpu=True).is_blocked == is_blocked
        assert not costs_of(replace(config), is_on_cpu=False).is_blocked


def test_output_gates_and_expert_biases_count_in_flops_and_parameters() -> None:
    plain, gated = (make_costs(attention_output_gate=has_gate) for has_gate in (False, True))
    assert gated.flops_per_token() - plain.flops_per_token() == 6 * 2 * 12 * 24  # two layers, h 12, all heads 24
    assert gated.unit_work(2, 1, 4)[1].products[0].columns - plain.unit_work(2, 1, 4)[1].products[0].columns == 24


def test_value_heads_count_in_flops() -> None:
    """Two layers lose 4 x 2 rows of values and columns of the output, and as many products of each score."""
    plain, smaller = make_costs(), make_costs(v_head_dim=4)
    assert plain.flops_per_token() - smaller.flops_per_token() == 6 * 2 * (2 * 8 * 12 + 8 * 3.5)
    scores = smaller.unit_work(2, 1, 4)[1].core
    assert [product.inner for product in scores] == [6, 7] and [product.columns for product in scores] == [7, 4]


def test_layers_have_their_own_groups_and_sinks() -> None:
    windows: dict[str, Any] = {"window_size": 2, "window_attn_skip_freq": "2"}  # in the first of two layers
    costs = make_costs(num_query_groups=1, window_num_query_groups=2, **windows)
    assert [work.products[0].columns for work in costs.unit_work(2, 1, 4)[1:3]] == [24 + 4 * 6, 24 + 2 * 6]
    first, second = costs.unit_saved_bytes(2, 1, 4)[1:3]
    assert first.full - second.full == 2 * 7 * 2 * 6 * 4
    sinks = make_costs(softmax_type="learnable", sink_layers="window", **windows)
    assert [
        sinks.layer_parameters(layer=layer) - make_costs(**windows).layer_parameters(layer=layer) for layer in (0, 1)
    ] == [4, 0]


def test_sinks_need_no_window_mask_and_no_flash_kernel() -> None:
    flags = "--window-size 3 --seq-length 16 --attention-dropout 0 --vocab-size 9 --position-embedding-type rope"
    for sinks, uses_starts in (("", False), ("--softmax-type learnable", True)):
        config = parse(f"{flags} {sinks}".split(), world_size=1, env={})
        assert costs_of(config, is_on_cpu=True).uses_document_starts == uses_starts
    config = parse(f"{flags} --softmax-type learnable --fp64 --seq-length 1024".split(), world_size=1, env={})
    assert mask_reason(config, "cuda") is not None and mask_reason(config, "cpu") is None
    assert not costs_of(config, is_on_cpu=False).is_fused and costs_of(config, is_on_cpu=True).is_fused

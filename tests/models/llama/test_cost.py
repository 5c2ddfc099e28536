"""Costs of a LLaMA against counting by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config import ModelConfig, parse
from megatron.costs.decoder_cost import DecoderCosts
from megatron.models.registry import costs_of

LLAMA_3_8B = ModelConfig(
    num_layers=32, hidden_size=4096, num_attention_heads=32, ff_hidden_size=14336, vocab_size=128256,
    max_position_embeddings=8192, untie_embeddings=True, activation="gated-silu", position_embedding_type="rope",
    normalization="RMSNorm", num_query_groups=8,
)  # fmt: skip
SMALL = replace(
    LLAMA_3_8B, num_layers=3, hidden_size=24, num_attention_heads=4, kv_hidden_size=6, ff_hidden_size=40, vocab_size=64,
    num_query_groups=4,
)  # fmt: skip


def test_published_models_match_parameter_counts() -> None:
    assert DecoderCosts(LLAMA_3_8B, 8192).num_parameters == 8_030_261_248
    llama_2_7b = replace(LLAMA_3_8B, ff_hidden_size=11008, vocab_size=32000, num_query_groups=32)
    assert DecoderCosts(llama_2_7b, 4096).num_parameters == 6_738_415_616


def test_costs_of_config_use_its_model_length_and_groups() -> None:
    flags = ["--seq-length", "96", "--vocab-size", "101", "--num-query-groups", "2"]
    config = parse(flags, world_size=1, env={}, family="llama")
    assert costs_of(config) == DecoderCosts(config.model, 96, mask_bytes=0)
    assert config.model.num_query_groups == 2


@pytest.mark.parametrize("changes", [{}, {"untie_embeddings": False, "hidden_bias": True}], ids=["", "tied, biases"])
@pytest.mark.parametrize("num_groups", [2, 4])
def test_parameter_count_matches_built_model(changes: dict, num_groups: int) -> None:
    from megatron.models import DecoderModel, ParallelContext, model_args_from
    from megatron.mpu.groups import Group

    model_config = replace(SMALL, num_query_groups=num_groups, **changes)
    for tensor in (1, 2):
        parallel = ParallelContext(Group(tuple(range(tensor)), 0))
        model = DecoderModel(model_args_from(model_config), parallel)
        num_built = sum(parameter.numel() for parameter in model.parameters())
        assert DecoderCosts(model_config, 8).stage_parameters([0, 6], tensor) == [num_built]


def test_fewer_key_value_heads_reduce_costs() -> None:
    """Of a layer's products, its scores and what it keeps: two of four heads of keys and values."""
    full, half = (DecoderCosts(replace(SMALL, num_query_groups=num_groups), 32) for num_groups in (4, 2))
    key_width = 2 * 6
    assert full.flops_per_token() - half.flops_per_token() == 6 * 3 * 2 * 24 * key_width
    saved_bytes = full.unit_saved_bytes(2, 1, 4)[1].full - half.unit_saved_bytes(2, 1, 4)[1].full
    assert saved_bytes == 2 * 32 * 3 * key_width * 4  # keys before and behind their turn, values


def test_flops_per_token_exclude_norm_biases() -> None:
    """As GPT-2's, without the norms' shifts, which are counted with the products."""
    with_biases = replace(SMALL, normalization="LayerNorm")
    difference = DecoderCosts(with_biases, 32).flops_per_token() - DecoderCosts(SMALL, 32).flops_per_token()
    assert difference == 6 * (2 * 3 + 1) * 24

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


def test_published_models_have_their_numbers_of_parameters() -> None:
    assert DecoderCosts(LLAMA_3_8B, 8192).num_parameters == 8_030_261_248
    llama_2_7b = replace(LLAMA_3_8B, ff_hidden_size=11008, vocab_size=32000, num_query_groups=32)
    assert DecoderCosts(llama_2_7b, 4096).num_parameters == 6_738_415_616


def test_the_costs_of_a_configuration_are_those_of_its_sizes_length_and_groups() -> None:
    words = ["--seq-length", "96", "--vocab-size", "101", "--num-query-groups", "2"]
    config = parse(words, world_size=1, env={}, family="llama")
    assert costs_of(config) == DecoderCosts(config.model, 96, mask_bytes=0)
    assert config.model.num_query_groups == 2


@pytest.mark.parametrize("changes", [{}, {"untie_embeddings": False, "hidden_bias": True}], ids=["", "tied, biases"])
@pytest.mark.parametrize("groups", [2, 4])
def test_parameters_are_those_of_the_model_that_is_built(changes: dict, groups: int) -> None:
    from megatron.models import DecoderModel, ParallelContext, model_args_from
    from megatron.mpu.groups import Group

    sizes = replace(SMALL, num_query_groups=groups, **changes)
    for tensor in (1, 2):
        place = ParallelContext(Group(tuple(range(tensor)), 0))
        model = DecoderModel(model_args_from(sizes), place)
        built = sum(parameter.numel() for parameter in model.parameters())
        assert DecoderCosts(sizes, 8).stage_parameters([0, 6], tensor) == [built]


def test_fewer_keys_cost_less() -> None:
    """Of a layer's products, its scores and what it keeps: two of four heads of keys and values."""
    full, half = (DecoderCosts(replace(SMALL, num_query_groups=groups), 32) for groups in (4, 2))
    keys = 2 * 6
    assert full.flops_per_token() - half.flops_per_token() == 6 * 3 * 2 * 24 * keys
    kept = full.unit_kept(2, 1, 4)[1].full - half.unit_kept(2, 1, 4)[1].full
    assert kept == 2 * 32 * 3 * keys * 4  # keys before and behind their turn, values


def test_a_token_costs_what_its_products_cost() -> None:
    """As GPT-2's, without the norms' shifts, which are counted with the products."""
    shifting = replace(SMALL, normalization="LayerNorm")
    difference = DecoderCosts(shifting, 32).flops_per_token() - DecoderCosts(SMALL, 32).flops_per_token()
    assert difference == 6 * (2 * 3 + 1) * 24

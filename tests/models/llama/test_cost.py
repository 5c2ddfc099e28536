"""Costs of a LLaMA against counting by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config import ModelConfig, parse
from megatron.models.common.decoder_cost import DecoderCosts
from megatron.models.llama.cost import LlamaCosts
from megatron.models.registry import costs_of

LLAMA_3_8B = ModelConfig(
    num_layers=32, hidden_size=4096, num_attention_heads=32, ff_hidden_size=14336, vocab_size=128256,
    max_position_embeddings=8192, untie_embeddings=True, activation="gated-silu",
)  # fmt: skip
SMALL = replace(
    LLAMA_3_8B, num_layers=3, hidden_size=24, num_attention_heads=4, kv_hidden_size=6, ff_hidden_size=40, vocab_size=64
)


def test_published_models_have_their_numbers_of_parameters() -> None:
    assert LlamaCosts(LLAMA_3_8B, 8192, num_groups=8).num_parameters == 8_030_261_248
    llama_2_7b = replace(LLAMA_3_8B, ff_hidden_size=11008, vocab_size=32000)
    assert LlamaCosts(llama_2_7b, 4096).num_parameters == 6_738_415_616


def test_the_costs_of_a_configuration_are_those_of_its_sizes_length_and_groups() -> None:
    words = ["--seq-length", "96", "--vocab-size", "101", "--num-query-groups", "2"]
    config = parse(words, world_size=1, env={}, family="llama")
    assert costs_of(config) == LlamaCosts(config.model, 96, num_groups=2, mask_bytes=0)


@pytest.mark.parametrize("changes", [{}, {"untie_embeddings": False, "hidden_bias": True}], ids=["", "tied, biases"])
@pytest.mark.parametrize("groups", [2, 4])
def test_parameters_are_those_of_the_model_that_is_built(changes: dict, groups: int) -> None:
    from megatron.config import LlamaConfig
    from megatron.models import LlamaModel, ParallelContext, llama_model_args_from
    from megatron.mpu.groups import Group

    sizes = replace(SMALL, **changes)
    for tensor in (1, 2):
        place = ParallelContext(Group(tuple(range(tensor)), 0))
        model = LlamaModel(llama_model_args_from(replace(sizes, num_query_groups=groups), LlamaConfig()), place)
        built = sum(parameter.numel() for parameter in model.parameters())
        assert LlamaCosts(sizes, 8, num_groups=groups).stage_parameters([0, 6], tensor) == [built]


def test_fewer_keys_cost_less() -> None:
    """Of a layer's products, its scores and what it keeps: two of four heads of keys and values."""
    full, half = (LlamaCosts(SMALL, 32, num_groups=groups) for groups in (4, 2))
    keys = 2 * 6
    assert full.flops_per_token() - half.flops_per_token() == 6 * 3 * 2 * 24 * keys
    kept = full.unit_kept(2, 1, 4)[1].full - half.unit_kept(2, 1, 4)[1].full
    assert kept == 2 * 32 * 3 * keys * 4  # keys before and behind their turn, values


def test_a_token_costs_what_its_products_cost() -> None:
    """As GPT-2's, without the norms' shifts, which are counted with the products."""
    difference = DecoderCosts(SMALL, 32).flops_per_token() - LlamaCosts(SMALL, 32).flops_per_token()
    assert difference == 6 * (2 * 3 + 1) * 24

"""Costs of an MPT against counting by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config import ModelConfig, parse
from megatron.costs.decoder_cost import DecoderCosts
from megatron.models.registry import costs_of

MPT_7B = ModelConfig(
    num_layers=32, hidden_size=4096, num_attention_heads=32, vocab_size=50432, max_position_embeddings=2048,
    position_embedding_type="alibi", norm_bias=False,
)  # fmt: skip
SMALL = replace(
    MPT_7B, num_layers=3, hidden_size=24, num_attention_heads=4, num_query_groups=4, kv_hidden_size=6, ff_hidden_size=96
)


def test_mpt_7b_has_its_published_number_of_parameters() -> None:
    assert DecoderCosts(MPT_7B, 2048).num_parameters == 6_649_286_656


def test_the_costs_of_a_configuration_are_those_of_its_sizes_length_and_documents() -> None:
    words = ["--seq-length", "96", "--vocab-size", "101"]
    config = parse(words, world_size=1, env={}, family="mpt")
    assert costs_of(config) == DecoderCosts(config.model, 96, mask_bytes=0)
    config = parse([*words, "--reset-attention-mask"], world_size=1, env={}, family="mpt")
    assert costs_of(config) == DecoderCosts(config.model, 96, has_segments=True, mask_bytes=0, is_by_length=True)


@pytest.mark.parametrize("untied", [False, True])
def test_parameters_are_those_of_the_model_that_is_built(untied: bool) -> None:
    from megatron.models import DecoderModel, ParallelContext, model_args_from
    from megatron.mpu.groups import Group

    sizes = replace(SMALL, untie_embeddings=untied, vocab_size=64)
    for tensor in (1, 2):
        model = DecoderModel(model_args_from(sizes), ParallelContext(Group(tuple(range(tensor)), 0)))
        built = sum(parameter.numel() for parameter in model.parameters())
        assert DecoderCosts(sizes, 8).stage_parameters([0, 6], tensor) == [built]


def test_a_stage_keeps_one_bias_and_one_for_the_documents_of_each_micro_batch() -> None:
    settings = {"micro_batch_size": 2, "num_micro_batches": 4, "tensor": 2, "dtype": "bf16"}
    plain, apart = (DecoderCosts(SMALL, 32, has_segments=apart) for apart in (False, True))
    bounds = plain.stage_bounds(2)
    without = DecoderCosts(replace(SMALL, position_embedding_type="none"), 32).memory_per_stage(bounds, **settings)  # type: ignore[arg-type]
    bias = 2 * 2 * 32**2  # bytes: width, heads of a rank, s^2
    for stage, forwards in ((0, 2), (1, 1)):  # in flight with 1F1B
        found = [costs.memory_per_stage(bounds, **settings)[stage] for costs in (plain, apart)]
        assert found[0].activations - without[stage].activations == bias
        assert found[1].activations - found[0].activations == forwards * 2 * bias


def test_a_token_costs_what_its_products_cost() -> None:
    """As GPT-2's, without the norms' shifts, which are counted with the products."""
    shifts = 2 * SMALL.num_layers + 1
    difference = (
        DecoderCosts(replace(SMALL, norm_bias=True), 32).flops_per_token() - DecoderCosts(SMALL, 32).flops_per_token()
    )
    assert difference == 6 * shifts * SMALL.hidden_size

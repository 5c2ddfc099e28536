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


def test_mpt_7b_matches_published_parameter_count() -> None:
    assert DecoderCosts(MPT_7B, 2048).num_parameters == 6_649_286_656


def test_costs_of_config_use_its_model_length_and_documents() -> None:
    flags = ["--seq-length", "96", "--vocab-size", "101"]
    config = parse(flags, world_size=1, env={}, family="mpt")
    assert costs_of(config) == DecoderCosts(config.model, 96, mask_bytes=0)
    config = parse([*flags, "--reset-attention-mask"], world_size=1, env={}, family="mpt")
    assert costs_of(config) == DecoderCosts(
        config.model, 96, has_segments=True, mask_bytes=0, uses_document_starts=True
    )


@pytest.mark.parametrize("is_untied", [False, True])
def test_parameter_count_matches_built_model(is_untied: bool) -> None:
    from megatron.models import DecoderModel, ParallelContext, model_args_from
    from megatron.mpu.groups import Group

    model_config = replace(SMALL, untie_embeddings=is_untied, vocab_size=64)
    for tensor in (1, 2):
        model = DecoderModel(model_args_from(model_config), ParallelContext(Group(tuple(range(tensor)), 0)))
        num_built = sum(parameter.numel() for parameter in model.parameters())
        assert DecoderCosts(model_config, 8).stage_parameters([0, 6], tensor) == [num_built]


def test_stage_saves_one_bias_and_document_bias_per_micro_batch() -> None:
    settings = {"micro_batch_size": 2, "num_micro_batches": 4, "tensor": 2, "dtype": "bf16"}
    plain, segmented = (DecoderCosts(SMALL, 32, has_segments=segmented) for segmented in (False, True))
    bounds = plain.stage_bounds(2)
    without_bias = DecoderCosts(replace(SMALL, position_embedding_type="none"), 32).memory_per_stage(bounds, **settings)  # type: ignore[arg-type]
    bias_bytes = 2 * 2 * 32**2  # bytes: width, heads of a rank, s^2
    for stage, num_forwards in ((0, 2), (1, 1)):  # in flight with 1F1B
        memories = [costs.memory_per_stage(bounds, **settings)[stage] for costs in (plain, segmented)]
        assert memories[0].activations - without_bias[stage].activations == bias_bytes
        assert memories[1].activations - memories[0].activations == num_forwards * 2 * bias_bytes


def test_flops_per_token_exclude_norm_biases() -> None:
    """As GPT-2's, without the norms' shifts, which are counted with the products."""
    num_norms = 2 * SMALL.num_layers + 1
    difference = (
        DecoderCosts(replace(SMALL, norm_bias=True), 32).flops_per_token() - DecoderCosts(SMALL, 32).flops_per_token()
    )
    assert difference == 6 * num_norms * SMALL.hidden_size

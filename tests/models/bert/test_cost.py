"""Costs of a BERT against counting by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.config import BertConfig, ModelConfig, parse
from megatron.models.bert.cost import BertCosts
from megatron.models.registry import costs_of

BASE = ModelConfig(
    num_layers=12, hidden_size=768, num_attention_heads=12, vocab_size=30522, max_position_embeddings=512,
    hidden_bias=True,
)  # fmt: skip
SMALL = replace(
    BASE, num_layers=3, hidden_size=24, num_attention_heads=4, num_query_groups=4, kv_hidden_size=6, ff_hidden_size=96
)


def test_bert_base_matches_published_parameter_count() -> None:
    """110 M in the paper; 109,482,240 of the encoder with its pooler, and the heads."""
    head_parameters = 768 * 768 + 768 + 2 * 768 + 30522 + 2 * 768 + 2
    assert BertCosts(BASE, 512, BertConfig()).num_parameters == 109_482_240 + head_parameters


@pytest.mark.parametrize("has_binary_head", [True, False])
def test_parameter_count_matches_built_model(has_binary_head: bool) -> None:
    from megatron.models import BertModel, ParallelContext, bert_model_args_from
    from megatron.mpu.groups import Group

    model_config, bert = replace(SMALL, vocab_size=64), BertConfig(binary_head=has_binary_head)
    for tensor in (1, 2):
        model = BertModel(bert_model_args_from(model_config, bert), ParallelContext(Group(tuple(range(tensor)), 0)))
        num_built = sum(parameter.numel() for parameter in model.parameters())
        assert BertCosts(model_config, 8, bert).stage_parameters([0, 6], tensor) == [num_built]


def test_flops_count_products_and_attention_scores() -> None:
    costs, s, h = BertCosts(SMALL, 32, BertConfig()), 32, 24
    layer_products = 4 * h * h + 4 * h + 2 * h * 96 + 96 + h + 4 * h
    token_products = 3 * layer_products + 2 * h + h * h + SMALL.vocab_size * h
    pooler_products = h * h + h + 2 * h + 2
    assert costs.flops_per_sample == pytest.approx(6 * (s * token_products + pooler_products) + 12 * 3 * s * s * h)
    assert BertCosts(SMALL, 32, BertConfig(binary_head=False)).flops_per_sample == pytest.approx(
        costs.flops_per_sample - 6 * pooler_products
    )


def test_last_stage_gets_fewer_layers_for_transform_and_head() -> None:
    config = parse(["--num-layers", "8", "--vocab-size", "30522"], world_size=1, env={}, family="bert")
    costs = costs_of(config)
    assert costs == BertCosts(config.model, config.batch.seq_length, config.family_config)
    bounds = costs.stage_bounds(2)
    assert bounds[0] == 0 and bounds[-1] == 11 and bounds[1] > 5
    assert costs.unit_names[-2:] == ["transform", "head"] and costs.unit_costs[-2] > 0

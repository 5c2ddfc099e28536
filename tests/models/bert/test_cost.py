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


def test_bert_base_has_its_published_number_of_parameters() -> None:
    """110 M in the paper; 109,482,240 of the encoder with its pooler, and the heads."""
    heads = 768 * 768 + 768 + 2 * 768 + 30522 + 2 * 768 + 2
    assert BertCosts(BASE, 512, BertConfig()).num_parameters == 109_482_240 + heads


@pytest.mark.parametrize("has_both", [True, False])
def test_parameters_are_those_of_the_model_that_is_built(has_both: bool) -> None:
    from megatron.models import BertModel, ParallelContext, bert_model_args_from
    from megatron.mpu.groups import Group

    sizes, bert = replace(SMALL, vocab_size=64), BertConfig(binary_head=has_both)
    for tensor in (1, 2):
        model = BertModel(bert_model_args_from(sizes, bert), ParallelContext(Group(tuple(range(tensor)), 0)))
        built = sum(parameter.numel() for parameter in model.parameters())
        assert BertCosts(sizes, 8, bert).stage_parameters([0, 6], tensor) == [built]


def test_flops_are_six_for_each_number_in_a_product_and_twelve_for_all_scores() -> None:
    costs, s, h = BertCosts(SMALL, 32, BertConfig()), 32, 24
    layer = 4 * h * h + 4 * h + 2 * h * 96 + 96 + h + 4 * h
    words = 3 * layer + 2 * h + h * h + SMALL.vocab_size * h
    second = h * h + h + 2 * h + 2
    assert costs.flops_per_sample == pytest.approx(6 * (s * words + second) + 12 * 3 * s * s * h)
    assert BertCosts(SMALL, 32, BertConfig(binary_head=False)).flops_per_sample == pytest.approx(
        costs.flops_per_sample - 6 * second
    )


def test_the_last_stage_gets_fewer_layers_for_transform_and_head() -> None:
    config = parse(["--num-layers", "8", "--vocab-size", "30522"], world_size=1, env={}, family="bert")
    costs = costs_of(config)
    assert costs == BertCosts(config.model, config.batch.seq_length, config.own)
    bounds = costs.stage_bounds(2)
    assert bounds[0] == 0 and bounds[-1] == 11 and bounds[1] > 5
    assert costs.unit_names[-2:] == ["transform", "head"] and costs.unit_costs[-2] > 0

"""What the common decoder is with the settings of LLaMA: its parameters, its positions, what it refuses."""

from __future__ import annotations

import pytest
import torch

from megatron.models.common.decoder import DecoderModel
from megatron.mpu.groups import Group
from tests.helpers.llama_samples import llama_model_args
from tests.helpers.model_samples import SEQ, VOCAB, fill_weights, make_batch, make_parallel_context


def test_rejects_query_groups_that_do_not_divide() -> None:
    parallel = make_parallel_context(Group((0, 1, 2, 3), 1))
    with pytest.raises(ValueError, match="--num-query-groups must be a multiple of --model-parallel-size, got 2 and 4"):
        DecoderModel(llama_model_args(), parallel)
    with pytest.raises(ValueError, match="--num-attention-heads must be a multiple of --num-query-groups, got 4 and 3"):
        DecoderModel(llama_model_args(num_query_groups=3))


def test_llama_has_no_biases_or_position_table() -> None:
    shapes = {name: tuple(p.shape) for name, p in DecoderModel(llama_model_args()).named_parameters()}
    assert len(shapes) == 3 + 6 * 2 and all(name.endswith(".weight") for name in shapes)
    assert shapes["layers.0.attention.query_key_value.weight"] == ((4 + 2 * 2) * 4, 16)
    assert shapes["layers.0.mlp.up.weight"] == (2 * 24, 16) and shapes["head.weight"] == (VOCAB, 16)
    biased = [name for name, _ in DecoderModel(llama_model_args(hidden_bias=True)).named_parameters()]
    assert sum(name.endswith(".bias") for name in biased) == 4 * 2


@torch.no_grad()
def test_positions_default_to_range() -> None:
    model, batch = fill_weights(DecoderModel(llama_model_args()).double()), make_batch()
    assert model(batch.tokens).equal(model(batch.tokens, torch.arange(SEQ).expand_as(batch.tokens)))
    scattered = 3 * torch.arange(SEQ).expand_as(batch.tokens) % SEQ
    assert (model(batch.tokens) - model(batch.tokens, scattered)).abs().max() > 1e-3


def test_rejects_positions_out_of_range():
    model, batch = fill_weights(DecoderModel(llama_model_args())), make_batch()
    for positions in (batch.position_ids + 1, batch.position_ids - 1):
        with pytest.raises(ValueError, match=r"position_ids must be from 0 to 11, got -?1 to 1[02]"):
            model(batch.tokens, positions)

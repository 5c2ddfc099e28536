"""What the common decoder is with the settings of LLaMA: its parameters, its positions, what it refuses."""

from __future__ import annotations

import pytest
import torch

from megatron.models.common.decoder import DecoderModel
from megatron.mpu.groups import Group
from tests.helpers.llama_samples import llama_sizes
from tests.helpers.model_samples import SEQ, VOCAB, batch_of, filled, place_of


def test_groups_are_cut_whole_or_not_at_all() -> None:
    place = place_of(Group((0, 1, 2, 3), 1))
    with pytest.raises(ValueError, match="--num-query-groups must be a multiple of --model-parallel-size, got 2 and 4"):
        DecoderModel(llama_sizes(), place)
    with pytest.raises(ValueError, match="--num-attention-heads must be a multiple of --num-query-groups, got 4 and 3"):
        DecoderModel(llama_sizes(num_query_groups=3))


def test_there_is_no_bias_and_no_table_of_positions() -> None:
    shapes = {name: tuple(p.shape) for name, p in DecoderModel(llama_sizes()).named_parameters()}
    assert len(shapes) == 3 + 6 * 2 and all(name.endswith(".weight") for name in shapes)
    assert shapes["layers.0.attention.query_key_value.weight"] == ((4 + 2 * 2) * 4, 16)
    assert shapes["layers.0.mlp.up.weight"] == (2 * 24, 16) and shapes["head.weight"] == (VOCAB, 16)
    biased = [name for name, _ in DecoderModel(llama_sizes(hidden_bias=True)).named_parameters()]
    assert sum(name.endswith(".bias") for name in biased) == 4 * 2


@torch.no_grad()
def test_positions_count_from_0_where_none_are_given() -> None:
    model, batch = filled(DecoderModel(llama_sizes()).double()), batch_of()
    assert model(batch.tokens).equal(model(batch.tokens, torch.arange(SEQ).expand_as(batch.tokens)))
    scattered = 3 * torch.arange(SEQ).expand_as(batch.tokens) % SEQ
    assert (model(batch.tokens) - model(batch.tokens, scattered)).abs().max() > 1e-3


def test_positions_beyond_the_longest_are_refused():
    model, batch = filled(DecoderModel(llama_sizes())), batch_of()
    for wrong in (batch.position_ids + 1, batch.position_ids - 1):
        with pytest.raises(ValueError, match=r"position_ids must be from 0 to 11, got -?1 to 1[02]"):
            model(batch.tokens, wrong)

"""What the common decoder is with the settings of GPT-2: what counts in its loss, its parameters, what it refuses."""

from __future__ import annotations

import pytest
import torch

from megatron.models.common.decoder import DecoderModel
from megatron.mpu.groups import Group
from tests.helpers.model_samples import (
    batch_of,
    filled,
    place_of,
    small_sizes,
)


def test_tokens_outside_the_loss_mask_do_not_count():
    model = filled(DecoderModel(small_sizes()).double())
    batch = batch_of()
    batch.loss_mask[:, 6:] = 0
    loss, count = model(**vars(batch))
    assert count.item() == batch.loss_mask.sum().item()
    batch.labels = batch.labels.clone()
    batch.labels[:, 6:] = 0
    assert torch.equal(model(**vars(batch))[0], loss)


def test_logical_names_are_those_of_checkpoints():
    names = [name for name, _ in DecoderModel(small_sizes(num_layers=1, untie_embeddings=True)).named_parameters()]
    parts = ["input_norm", "attention.query_key_value", "attention.dense", "post_attention_norm", "mlp.up", "mlp.down"]
    layer = [f"layers.0.{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    ends = ["embedding.word.weight", "embedding.position.weight", "final_norm.weight", "final_norm.bias", "head.weight"]
    assert sorted(names) == sorted(layer + ends)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(
        ValueError, match="--num-attention-heads must be a multiple of --model-parallel-size, got 4 and 3"
    ):
        DecoderModel(small_sizes(), place_of(Group((0, 1, 2), 0)))

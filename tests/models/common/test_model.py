"""What the common decoder is with the settings of GPT-2: what counts in its loss, its parameters, what it refuses."""

from __future__ import annotations

import pytest
import torch

from megatron.models.common.decoder import DecoderModel
from megatron.mpu.groups import Group
from tests.helpers.model_samples import (
    fill_weights,
    make_batch,
    make_parallel_context,
    small_model_args,
)


def test_tokens_outside_loss_mask_do_not_count():
    model = fill_weights(DecoderModel(small_model_args()).double())
    batch = make_batch()
    batch.loss_mask[:, 6:] = 0
    loss, count = model(**vars(batch))
    assert count.item() == batch.loss_mask.sum().item()
    batch.labels = batch.labels.clone()
    batch.labels[:, 6:] = 0
    assert torch.equal(model(**vars(batch))[0], loss)


def test_logical_names_match_checkpoint_names():
    names = [name for name, _ in DecoderModel(small_model_args(num_layers=1, untie_embeddings=True)).named_parameters()]
    module_names = [
        "input_norm",
        "attention.query_key_value",
        "attention.dense",
        "post_attention_norm",
        "mlp.up",
        "mlp.down",
    ]
    layer_names = [f"layers.0.{module_name}.{suffix}" for module_name in module_names for suffix in ("weight", "bias")]
    other_names = [
        "embedding.word.weight",
        "embedding.position.weight",
        "final_norm.weight",
        "final_norm.bias",
        "head.weight",
    ]
    assert sorted(names) == sorted(layer_names + other_names)


def test_rejects_indivisible_heads():
    with pytest.raises(
        ValueError, match="--num-attention-heads must be a multiple of --model-parallel-size, got 4 and 3"
    ):
        DecoderModel(small_model_args(), make_parallel_context(Group((0, 1, 2), 0)))

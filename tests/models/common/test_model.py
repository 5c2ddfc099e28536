"""GPT-2 on 2 and 4 tensor ranks against one process, in fp64: logits, loss and every gradient."""

from __future__ import annotations

import functools

import pytest
import torch

from megatron.models.common.decoder import DecoderModel
from megatron.mpu.groups import Group
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import (
    SEQ,
    VOCAB,
    batch_of,
    filled,
    gradients_of,
    joined,
    place_of,
    small_sizes,
    worst_relative,
)
from tests.helpers.whole import whole_world

VARIANTS = {
    "plain": {},
    "documents": {},
    "untied": {"untie_embeddings": True},
    "head size 6, not h / a": {"kv_hidden_size": 6},
    "feed-forward 20": {"ff_hidden_size": 20},
    "no biases": {"hidden_bias": False},
    "residual after the norm": {"apply_residual_connection_post_layernorm": True},
    "vocabulary by 8, tanh": {"make_vocab_size_divisible_by": 8, "activation": "gelu-tanh"},
    "recompute": {"checkpoint_activations": True},
}


def run(rank, size):
    """Return logits, loss sum, count and gradients of every variant."""
    group = whole_world(rank, size)
    return {name: one(group, name, changes) for name, changes in VARIANTS.items()}


def one(group: Group, name, changes):
    model = filled(DecoderModel(small_sizes(**changes), place_of(group)).double())
    batch = vars(batch_of(with_documents=name == "documents"))
    inputs = {key: batch[key] for key in ("tokens", "position_ids", "segment_ids")}
    with torch.no_grad():
        logits = model(**inputs)
    loss, count = model(**batch)
    (loss / count).backward()
    return logits, loss.item(), count.item(), gradients_of(model)


@functools.cache
def seen(size):
    return run_ranks(size, run, size) if size > 1 else [run(0, 1)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_tensor_ranks_together_equal_one_process(name, size):
    logits, loss, count, gradients = seen(1)[0][name]
    ranks = [results[name] for results in seen(size)]
    together = torch.cat([rank[0] for rank in ranks], dim=-1)[..., :VOCAB]
    assert (together - logits[..., :VOCAB]).abs().max() <= 1e-12 * logits.abs().max()
    assert {rank[2] for rank in ranks} == {count}
    assert all(abs(rank[1] - loss) <= 1e-12 * loss for rank in ranks)
    worst, where = worst_relative(joined([rank[3] for rank in ranks]), joined([gradients]))
    assert worst <= 1e-11, where


@pytest.mark.parametrize("size", [1, 2, 4])
def test_padded_rows_of_embedding_and_head_get_no_gradient_at_all(size):
    padded = 0
    for results in seen(size):
        for name in ("vocabulary by 8, tanh", "untied"):
            for parameter, (shard, gradient) in results[name][3].items():
                if parameter in ("embedding.word.weight", "head.weight"):
                    padded += gradient.shape[0] - shard.length
                    assert gradient[shard.length :].count_nonzero() == 0
    assert padded > 0


def test_a_document_has_the_logits_it_would_have_alone():
    model = filled(DecoderModel(small_sizes()).double())
    batch = batch_of()
    ids = torch.tensor([0] * 5 + [1] * (SEQ - 5)).expand_as(batch.tokens)
    positions = torch.cat([torch.arange(5), torch.arange(SEQ - 5)]).expand_as(batch.tokens)
    packed = model(batch.tokens, positions, ids)
    alone = model(batch.tokens[:, 5:], positions[:, 5:])
    assert (packed[5:] - alone).abs().max() <= 1e-12 * alone.abs().max()


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

"""Dropout in the model: under tensor parallelism, and under recompute (bit for bit)."""

from __future__ import annotations

import pytest
import torch

from megatron.models.common.attention import SelfAttention
from megatron.models.common.decoder import DecoderModel
from megatron.mpu.random import DropoutKey
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import fill_weights, make_batch, make_parallel_context, small_model_args
from tests.helpers.whole import group_of_all_ranks, random_tensor

DROPOUT_RATES = {"attention_dropout": 0.1, "hidden_dropout": 0.1}


def loss_and_gradients(*, has_documents=False, has_later_forward=True, **changes):
    model = fill_weights(
        DecoderModel(small_model_args(num_layers=3, **changes), make_parallel_context(group_of_all_ranks(0, 1)))
    )
    streams = model.parallel.streams
    streams.position = DropoutKey(2, 1)
    loss, _ = model(**vars(make_batch(with_documents=has_documents)))
    if has_later_forward:
        streams.position = DropoutKey(2, 2)  # another micro-batch's forward comes before this backward
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("rates", [{}, DROPOUT_RATES], ids=["no dropout", "dropout 0.1"])
def test_recompute_is_bitwise_equal(rates, interval, has_documents):
    expected = loss_and_gradients(has_documents=has_documents, **rates)
    actual = loss_and_gradients(
        has_documents=has_documents, checkpoint_activations=True, checkpoint_num_layers=interval, **rates
    )
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def hidden_states(rank, size):
    """Return what enters and leaves each layer in training, which all tensor ranks hold."""
    model = fill_weights(
        DecoderModel(small_model_args(**DROPOUT_RATES), make_parallel_context(group_of_all_ranks(rank, size)))
    )
    captured = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, inputs, output: captured.extend([inputs[0].detach(), output.detach()]))
    batch = make_batch()
    model(batch.tokens, batch.position_ids)
    return captured, attention_context(rank, size)


def attention_context(rank, size):
    """Return the context of heads that have the same weights on both ranks: only their masks can differ."""
    args = small_model_args(attention_dropout=0.5)
    layer = SelfAttention(args, make_parallel_context(group_of_all_ranks(rank, size)), 0)
    weight = layer.query_key_value.weight
    with torch.no_grad():
        weight.copy_(random_tensor(1, *weight.shape))
    captured = []
    layer.dense.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0].detach()))
    layer(random_tensor(2, 12, 3, args.hidden_size).float())
    return captured[0]


def test_tensor_ranks_share_hidden_masks_but_not_attention_masks():
    (hidden, context), (other_hidden, other_context) = run_ranks(2, hidden_states, 2)
    assert all(torch.equal(a, b) for a, b in zip(hidden, other_hidden, strict=True))
    assert (context - other_context).abs().mean() > 0.1


@pytest.mark.parametrize("site", ["attention_dropout", "hidden_dropout"])
def test_dropout_rates_apply_in_training_only(site):
    model = fill_weights(DecoderModel(small_model_args(**{site: 0.1})))
    plain = fill_weights(DecoderModel(small_model_args()))
    batch = make_batch()
    inputs = (batch.tokens, batch.position_ids)
    assert not torch.equal(model(*inputs), plain(*inputs))
    model.eval()
    assert torch.equal(model(*inputs), plain(*inputs))


def test_layers_and_sites_use_distinct_dropout_keys(monkeypatch):
    model = fill_weights(DecoderModel(small_model_args(**DROPOUT_RATES)))
    keys = []
    original_key = model.parallel.streams.key
    monkeypatch.setattr(
        model.parallel.streams, "key", lambda *key_args: keys.append(original_key(*key_args)) or keys[-1]
    )
    batch = make_batch()
    model(batch.tokens, batch.position_ids)
    assert len(keys) == len(set(keys)) == 1 + 2 * 3  # the embedding; attention, its output and the mlp of two layers

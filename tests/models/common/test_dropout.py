"""Dropout in the model: under tensor parallelism, and under recompute (bit for bit)."""

from __future__ import annotations

import pytest
import torch

from megatron.models.common.attention import SelfAttention
from megatron.models.common.decoder import DecoderModel
from megatron.mpu.random import DropoutKey
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import batch_of, filled, place_of, small_sizes
from tests.helpers.whole import random, whole_world

RATES = {"attention_dropout": 0.1, "hidden_dropout": 0.1}


def loss_and_gradients(*, documents=False, moves_on=True, **changes):
    model = filled(DecoderModel(small_sizes(num_layers=3, **changes), place_of(whole_world(0, 1))))
    streams = model.place.streams
    streams.position = DropoutKey(2, 1)
    loss, _ = model(**vars(batch_of(with_documents=documents)))
    if moves_on:
        streams.position = DropoutKey(2, 2)  # another micro-batch's forward comes before this backward
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("rates", [{}, RATES], ids=["no dropout", "dropout 0.1"])
def test_recompute_gives_the_same_bits(rates, every, documents):
    expected = loss_and_gradients(documents=documents, **rates)
    found = loss_and_gradients(documents=documents, checkpoint_activations=True, checkpoint_num_layers=every, **rates)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def hidden_states(rank, size):
    """Return what enters and leaves each layer in training, which all tensor ranks hold."""
    model = filled(DecoderModel(small_sizes(**RATES), place_of(whole_world(rank, size))))
    kept = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, inputs, output: kept.extend([inputs[0].detach(), output.detach()]))
    batch = batch_of()
    model(batch.tokens, batch.position_ids)
    return kept, attention_context(rank, size)


def attention_context(rank, size):
    """Return the context of heads that have the same weights on both ranks: only their masks can differ."""
    sizes = small_sizes(attention_dropout=0.5)
    layer = SelfAttention(sizes, place_of(whole_world(rank, size)), 0)
    local = layer.query_key_value.weight
    with torch.no_grad():
        local.copy_(random(1, *local.shape))
    kept = []
    layer.dense.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0].detach()))
    layer(random(2, 12, 3, sizes.hidden_size).float())
    return kept[0]


def test_tensor_ranks_drop_the_same_hidden_states_and_different_attention():
    (hidden, context), (other_hidden, other_context) = run_ranks(2, hidden_states, 2)
    assert all(torch.equal(a, b) for a, b in zip(hidden, other_hidden, strict=True))
    assert (context - other_context).abs().mean() > 0.1


@pytest.mark.parametrize("site", ["attention_dropout", "hidden_dropout"])
def test_each_rate_acts_in_training_only(site):
    model = filled(DecoderModel(small_sizes(**{site: 0.1})))
    plain = filled(DecoderModel(small_sizes()))
    batch = batch_of()
    inputs = (batch.tokens, batch.position_ids)
    assert not torch.equal(model(*inputs), plain(*inputs))
    model.eval()
    assert torch.equal(model(*inputs), plain(*inputs))


def test_layers_and_sites_drop_differently(monkeypatch):
    model = filled(DecoderModel(small_sizes(**RATES)))
    keys = []
    key = model.place.streams.key
    monkeypatch.setattr(model.place.streams, "key", lambda *place: keys.append(key(*place)) or keys[-1])
    batch = batch_of()
    model(batch.tokens, batch.position_ids)
    assert len(keys) == len(set(keys)) == 1 + 2 * 3  # the embedding; attention, its output and the mlp of two layers

"""Dropout masks: equal where ranks hold the same activation, different everywhere else, the same when recomputed."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.mpu.groups import Group
from megatron.mpu.random import DropoutKey, DropoutStreams, checkpoint

N = 4096
BASE_KEY = {"seed": 1, "data": 0, "tensor": 0, "step": 3, "micro_batch": 2, "layer": 5, "site": "mlp output"}


def make_mask(*, is_sharded=False, probability=0.5, n=N, **changes):
    """Return which elements are kept at one place."""
    key_fields = {**BASE_KEY, **changes}
    ranks = (0, 1)
    streams = DropoutStreams(key_fields["seed"], Group(ranks, key_fields["data"]), Group(ranks, key_fields["tensor"]))
    streams.position = DropoutKey(key_fields["step"], key_fields["micro_batch"])
    out = streams.dropout(
        torch.ones(n),
        probability,
        training=True,
        layer=key_fields["layer"],
        site=key_fields["site"],
        is_sharded=is_sharded,
    )
    return out != 0


def are_unrelated(a, b):
    """Two masks of independent fair coins agree on half of the places, within five standard deviations."""
    return abs((a == b).float().mean().item() - 0.5) <= 5 * 0.5 / math.sqrt(N)


def test_same_position_draws_same_mask():
    assert torch.equal(make_mask(), make_mask()) and torch.equal(make_mask(is_sharded=True), make_mask(is_sharded=True))


def test_tensor_ranks_share_masks_of_replicated_tensors():
    assert torch.equal(make_mask(tensor=0), make_mask(tensor=1))


def test_tensor_ranks_differ_for_sharded_tensors():
    first, second, replicated = make_mask(tensor=0, is_sharded=True), make_mask(tensor=1, is_sharded=True), make_mask()
    assert are_unrelated(first, second) and are_unrelated(first, replicated) and are_unrelated(second, replicated)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize(
    "change",
    [{"seed": 2}, {"data": 1}, {"step": 4}, {"micro_batch": 3}, {"layer": 6}, {"layer": -1}, {"site": "embedding"}]
    + [{"step": 2, "micro_batch": 3}],  # a key that only summed its parts would not see this
    ids=str,
)
def test_every_key_field_changes_mask(change, is_sharded):
    assert are_unrelated(make_mask(is_sharded=is_sharded), make_mask(is_sharded=is_sharded, **change))


def test_keys_are_distinct():
    streams = DropoutStreams(1)
    keys = set()
    for step in range(10):
        for micro_batch in range(10):
            streams.position = DropoutKey(step, micro_batch)
            keys |= {
                streams.key(layer, site, is_sharded)
                for layer in range(10)
                for site in "ab"
                for is_sharded in (False, True)
            }
    assert len(keys) == 10 * 10 * 10 * 2 * 2


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_keep_rate_and_scaling_are_correct(probability):
    n = 100_000
    streams = DropoutStreams(7)
    y = streams.dropout(torch.ones(n), probability, training=True, layer=0, site="embedding")
    sigma = math.sqrt(probability * (1 - probability) / n)
    assert abs((y != 0).double().mean().item() - (1 - probability)) <= 4 * sigma
    assert torch.equal(y[y != 0].unique(), torch.tensor([1 / (1 - probability)]))


def test_global_torch_rng_is_unchanged():
    before = torch.get_rng_state()
    make_mask()
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ZeroDivisionError), DropoutStreams().generator(torch.device("cpu"), 0, "embedding", False):
        torch.rand(3)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)


def test_masks_do_not_depend_on_previous_draws():
    torch.manual_seed(0)
    first = make_mask()
    torch.rand(1000)
    assert torch.equal(make_mask(), first)


def test_dropout_is_identity_in_eval_and_at_rate_zero():
    x = torch.ones(9)
    assert DropoutStreams().dropout(x, 0.5, training=False, layer=0, site="embedding") is x
    assert DropoutStreams().dropout(x, 0.0, training=True, layer=0, site="embedding") is x


def test_at_restores_position_after_error():
    streams = DropoutStreams()
    streams.position = DropoutKey(1, 1)
    with pytest.raises(ZeroDivisionError), streams.at(DropoutKey(0, 3)):
        assert streams.position == DropoutKey(0, 3)
        raise ZeroDivisionError
    assert streams.position == DropoutKey(1, 1)


def run_small_stack(streams, weights, x, *, recompute, advances_position):
    """Two layers with dropout; return the output and all gradients."""

    def layer(layer_idx, x, weight):
        y = torch.tanh(x @ weight)
        return x + streams.dropout(y, 0.1, training=True, layer=layer_idx, site="mlp output")

    weights = [weight.clone().requires_grad_() for weight in weights]
    x = x.clone().requires_grad_()
    streams.position = DropoutKey(4, 0)
    y = x
    for layer_idx, weight in enumerate(weights):
        y = checkpoint(streams, layer, layer_idx, y, weight) if recompute else layer(layer_idx, y, weight)
    if advances_position:
        streams.position = DropoutKey(4, 3)  # 1F1B: a later forward runs before this backward
    after = streams.position
    before = torch.get_rng_state()
    y.square().sum().backward()
    assert streams.position == after and torch.equal(torch.get_rng_state(), before)
    return [y.detach(), x.grad, *(weight.grad for weight in weights)]


def test_recompute_draws_same_masks_after_position_moved():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(16, 16, generator=generator) for _ in range(2)]
    x = torch.randn(32, 16, generator=generator)
    expected = run_small_stack(DropoutStreams(3), weights, x, recompute=False, advances_position=False)
    for advances_position in (False, True):
        actual = run_small_stack(DropoutStreams(3), weights, x, recompute=True, advances_position=advances_position)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))

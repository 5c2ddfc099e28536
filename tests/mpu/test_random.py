"""Dropout masks: equal where ranks hold the same activation, different everywhere else, the same when recomputed."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.mpu.groups import Group
from megatron.mpu.random import DropoutKey, DropoutStreams, checkpoint

N = 4096
BASE = {"seed": 1, "data": 0, "tensor": 0, "step": 3, "micro_batch": 2, "layer": 5, "site": "mlp output"}


def mask(*, is_cut=False, probability=0.5, n=N, **changes):
    """Return which elements are kept at one place."""
    at = {**BASE, **changes}
    two = (0, 1)
    streams = DropoutStreams(at["seed"], Group(two, at["data"]), Group(two, at["tensor"]))
    streams.position = DropoutKey(at["step"], at["micro_batch"])
    kept = streams.dropout(torch.ones(n), probability, training=True, layer=at["layer"], site=at["site"], is_cut=is_cut)
    return kept != 0


def are_unrelated(a, b):
    """Two masks of independent fair coins agree on half of the places, within five standard deviations."""
    return abs((a == b).float().mean().item() - 0.5) <= 5 * 0.5 / math.sqrt(N)


def test_the_same_place_draws_the_same_mask():
    assert torch.equal(mask(), mask()) and torch.equal(mask(is_cut=True), mask(is_cut=True))


def test_tensor_ranks_share_the_mask_of_what_they_all_hold():
    assert torch.equal(mask(tensor=0), mask(tensor=1))


def test_tensor_ranks_differ_where_the_tensor_is_cut():
    first, second, whole = mask(tensor=0, is_cut=True), mask(tensor=1, is_cut=True), mask()
    assert are_unrelated(first, second) and are_unrelated(first, whole) and are_unrelated(second, whole)


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(
    "change",
    [{"seed": 2}, {"data": 1}, {"step": 4}, {"micro_batch": 3}, {"layer": 6}, {"layer": -1}, {"site": "embedding"}]
    + [{"step": 2, "micro_batch": 3}],  # a key that only summed its parts would not see this
    ids=str,
)
def test_every_other_difference_of_place_gives_another_mask(change, is_cut):
    assert are_unrelated(mask(is_cut=is_cut), mask(is_cut=is_cut, **change))


def test_many_places_have_as_many_keys():
    streams = DropoutStreams(1)
    keys = set()
    for step in range(10):
        for micro_batch in range(10):
            streams.position = DropoutKey(step, micro_batch)
            keys |= {streams.key(layer, site, cut) for layer in range(10) for site in "ab" for cut in (False, True)}
    assert len(keys) == 10 * 10 * 10 * 2 * 2


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_the_rate_of_kept_elements_is_right_and_the_mean_is_kept(probability):
    n = 100_000
    streams = DropoutStreams(7)
    y = streams.dropout(torch.ones(n), probability, training=True, layer=0, site="embedding")
    sigma = math.sqrt(probability * (1 - probability) / n)
    assert abs((y != 0).double().mean().item() - (1 - probability)) <= 4 * sigma
    assert torch.equal(y[y != 0].unique(), torch.tensor([1 / (1 - probability)]))


def test_torchs_own_generator_is_left_as_it_was():
    before = torch.get_rng_state()
    mask()
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ZeroDivisionError), DropoutStreams().generator(torch.device("cpu"), 0, "embedding", False):
        torch.rand(3)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)


def test_masks_do_not_depend_on_what_was_drawn_before():
    torch.manual_seed(0)
    first = mask()
    torch.rand(1000)
    assert torch.equal(mask(), first)


def test_outside_training_and_at_rate_zero_nothing_happens():
    x = torch.ones(9)
    assert DropoutStreams().dropout(x, 0.5, training=False, layer=0, site="embedding") is x
    assert DropoutStreams().dropout(x, 0.0, training=True, layer=0, site="embedding") is x


def test_at_goes_to_a_position_and_comes_back_even_from_an_error():
    streams = DropoutStreams()
    streams.position = DropoutKey(1, 1)
    with pytest.raises(ZeroDivisionError), streams.at(DropoutKey(0, 3)):
        assert streams.position == DropoutKey(0, 3)
        raise ZeroDivisionError
    assert streams.position == DropoutKey(1, 1)


def small_stack(streams, weights, x, *, recompute, moves_on):
    """Two layers with dropout; return the output and all gradients."""

    def layer(index, x, weight):
        y = torch.tanh(x @ weight)
        return x + streams.dropout(y, 0.1, training=True, layer=index, site="mlp output")

    weights = [weight.clone().requires_grad_() for weight in weights]
    x = x.clone().requires_grad_()
    streams.position = DropoutKey(4, 0)
    y = x
    for index, weight in enumerate(weights):
        y = checkpoint(streams, layer, index, y, weight) if recompute else layer(index, y, weight)
    if moves_on:
        streams.position = DropoutKey(4, 3)  # 1F1B: a later forward runs before this backward
    after = streams.position
    before = torch.get_rng_state()
    y.square().sum().backward()
    assert streams.position == after and torch.equal(torch.get_rng_state(), before)
    return [y.detach(), x.grad, *(weight.grad for weight in weights)]


def test_recomputing_draws_the_same_masks_even_when_the_position_has_moved_on():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(16, 16, generator=generator) for _ in range(2)]
    x = torch.randn(32, 16, generator=generator)
    expected = small_stack(DropoutStreams(3), weights, x, recompute=False, moves_on=False)
    for moves_on in (False, True):
        found = small_stack(DropoutStreams(3), weights, x, recompute=True, moves_on=moves_on)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

"""The feed-forward part: gated or not, cut in any number of pairs of rows."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from megatron.models.common.decoder import DecoderModel
from megatron.models.common.transformer import MLP
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import batch_of, filled, gradients_of, joined, place_of, small_sizes, worst_relative
from tests.helpers.whole import random, whole_world

CHANGES = {"ff_hidden_size": 12, "hidden_bias": True}
FUNCTIONS = {"gated-gelu": lambda x: F.gelu(x, approximate="tanh"), "gated-silu": F.silu}


def run(rank, size, name):
    mlp = filled(MLP(small_sizes(activation=name, **CHANGES), place_of(whole_world(rank, size))).double())
    x = random(1, 5, 2, 16).requires_grad_()
    y = mlp(x)
    y.backward(random(2, 5, 2, 16))
    return y.detach(), x.grad, gradients_of(mlp)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_gated_one_is_the_activation_of_one_product_times_another(name, size):
    whole = filled(MLP(small_sizes(activation=name, **CHANGES), place_of(whole_world(0, 1))).double())
    weights = {key: p.detach().clone().requires_grad_() for key, p in whole.named_parameters()}
    x = random(1, 5, 2, 16).requires_grad_()
    gate, value = (F.linear(x, weights["up.weight"][i::2], weights["up.bias"][i::2]) for i in (0, 1))
    expected = F.linear(FUNCTIONS[name](gate) * value, weights["down.weight"], weights["down.bias"])
    expected.backward(random(2, 5, 2, 16))
    ranks = run_ranks(size, run, size, name) if size > 1 else [run(0, 1, name)]
    for y, grad, _ in ranks:
        assert (y - expected).abs().max() <= 1e-13 and (grad - x.grad).abs().max() <= 1e-13
    found = joined([gradients for *_, gradients in ranks])
    worst, where = worst_relative(found, {key: weight.grad for key, weight in weights.items()})
    assert worst <= 1e-13, where


def test_gpt2_may_be_gated_too():
    sizes = small_sizes(activation="gated-gelu")
    model = filled(DecoderModel(sizes))
    assert model.layers[0].mlp.up.weight.shape == (2 * sizes.ff_hidden_size, sizes.hidden_size)
    model(**vars(batch_of()))[0].backward()
    assert all(parameter.grad.norm() > 0 for name, parameter in model.named_parameters() if "mlp" in name)

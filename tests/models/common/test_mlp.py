"""The feed-forward part: gated or not, cut in any number of pairs of rows."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from megatron.models.common.decoder import DecoderModel
from megatron.models.common.transformer import MLP
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import (
    fill_weights,
    get_sharded_grads,
    join_shards,
    make_batch,
    make_parallel_context,
    small_model_args,
    worst_relative_error,
)
from tests.helpers.whole import group_of_all_ranks, random_tensor

OVERRIDES = {"ff_hidden_size": 12, "hidden_bias": True}
GATE_FUNCTIONS = {"gated-gelu": lambda x: F.gelu(x, approximate="tanh"), "gated-silu": F.silu}


def run_mlp(rank, size, name):
    mlp = fill_weights(
        MLP(
            small_model_args(activation=name, **OVERRIDES), make_parallel_context(group_of_all_ranks(rank, size))
        ).double()
    )
    x = random_tensor(1, 5, 2, 16).requires_grad_()
    y = mlp(x)
    y.backward(random_tensor(2, 5, 2, 16))
    return y.detach(), x.grad, get_sharded_grads(mlp)


@pytest.mark.parametrize("name", GATE_FUNCTIONS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_gated_mlp_is_activated_gate_times_value(name, size):
    full_mlp = fill_weights(
        MLP(small_model_args(activation=name, **OVERRIDES), make_parallel_context(group_of_all_ranks(0, 1))).double()
    )
    weights = {key: p.detach().clone().requires_grad_() for key, p in full_mlp.named_parameters()}
    x = random_tensor(1, 5, 2, 16).requires_grad_()
    gate, value = (F.linear(x, weights["up.weight"][i::2], weights["up.bias"][i::2]) for i in (0, 1))
    expected = F.linear(GATE_FUNCTIONS[name](gate) * value, weights["down.weight"], weights["down.bias"])
    expected.backward(random_tensor(2, 5, 2, 16))
    ranks = run_ranks(size, run_mlp, size, name) if size > 1 else [run_mlp(0, 1, name)]
    for y, grad, _ in ranks:
        assert (y - expected).abs().max() <= 1e-13 and (grad - x.grad).abs().max() <= 1e-13
    actual = join_shards([gradients for *_, gradients in ranks])
    worst, worst_name = worst_relative_error(actual, {key: weight.grad for key, weight in weights.items()})
    assert worst <= 1e-13, worst_name


def test_gpt2_supports_gated_activation():
    args = small_model_args(activation="gated-gelu")
    model = fill_weights(DecoderModel(args))
    assert model.layers[0].mlp.up.weight.shape == (2 * args.ff_hidden_size, args.hidden_size)
    model(**vars(make_batch()))[0].backward()
    assert all(parameter.grad.norm() > 0 for name, parameter in model.named_parameters() if "mlp" in name)

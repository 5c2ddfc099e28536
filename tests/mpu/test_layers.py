"""Cut linear layers against torch's."""

from __future__ import annotations

import functools

import pytest
import torch

from megatron.mpu.groups import Group
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.shard import shard_of
from tests.helpers.harness import run_ranks
from tests.helpers.whole import fill_shard, group_of_all_ranks, random_tensor

S, B, H, F = 5, 2, 6, 8
A, BIAS_A, C, BIAS_C = random_tensor(1, F, H), random_tensor(2, F), random_tensor(3, H, F), random_tensor(4, H)
X, UPSTREAM = random_tensor(5, S, B, H), random_tensor(6, S, B, H)


def column_then_row(rank, size):
    group = group_of_all_ranks(rank, size)
    up, down = ColumnParallelLinear(H, F, group=group).double(), RowParallelLinear(F, H, group=group).double()
    # the same layer without the other half: its output joined
    gathered = ColumnParallelLinear(H, F, gather_output=True, group=group).double()
    for layer, weight, bias in ((up, A, BIAS_A), (gathered, A, BIAS_A), (down, C, BIAS_C)):
        fill_shard(layer.weight, weight)
        fill_shard(layer.bias, bias)
    x = X.clone().requires_grad_()
    y = down(torch.tanh(up(x)))
    y.backward(UPSTREAM)
    gradients = {
        name: (shard_of(p), p.grad)
        for layer in (up, down)
        for name, p in ((f"{type(layer).__name__}.{n}", p) for n, p in layer.named_parameters())
    }
    return y.detach(), x.grad, gradients, gathered(X).detach()


@functools.cache
def reference():
    x = X.clone().requires_grad_()
    a, bias_a, c, bias_c = (w.clone().requires_grad_() for w in (A, BIAS_A, C, BIAS_C))
    hidden = torch.nn.functional.linear(x, a, bias_a)
    y = torch.nn.functional.linear(torch.tanh(hidden), c, bias_c)
    y.backward(UPSTREAM)
    gradients = {
        "ColumnParallelLinear.weight": a.grad, "ColumnParallelLinear.bias": bias_a.grad,
        "RowParallelLinear.weight": c.grad, "RowParallelLinear.bias": bias_c.grad,
    }  # fmt: skip
    return y.detach(), x.grad, gradients, hidden.detach()


def is_close(actual, expected):
    return (actual - expected).abs().max() <= 1e-13 * expected.abs().max()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_then_row_matches_two_linears(size):
    y, x_grad, gradients, hidden = reference()
    ranks = run_ranks(size, column_then_row, size) if size > 1 else [column_then_row(0, 1)]
    for rank_y, rank_x_grad, rank_gradients, rank_hidden in ranks:
        assert is_close(rank_y, y), "forward; a bias that each rank adds shows here"
        assert is_close(rank_hidden, hidden), "gather_output"
        assert is_close(rank_x_grad, x_grad), "input gradient"
        assert sorted(rank_gradients) == sorted(gradients)
        for name, (shard, gradient) in rank_gradients.items():
            assert is_close(gradient, shard.narrow(gradients[name])), name


def test_shards_of_all_ranks_form_full_weight():
    for size in (2, 4):
        groups = [Group(tuple(range(size)), rank) for rank in range(size)]
        up, down = (
            [ColumnParallelLinear(H, F, group=g) for g in groups],
            [RowParallelLinear(F, H, group=g) for g in groups],
        )
        assert torch.equal(torch.cat([shard_of(layer.weight).narrow(A) for layer in up], dim=0), A)
        assert torch.equal(torch.cat([shard_of(layer.weight).narrow(C) for layer in down], dim=1), C)
        assert torch.equal(torch.cat([shard_of(layer.bias).narrow(BIAS_A) for layer in up]), BIAS_A)
        assert all(not shard_of(layer.bias).is_partitioned and shard_of(layer.weight).is_partitioned for layer in down)


def test_layers_without_bias_have_none():
    assert [n for n, _ in ColumnParallelLinear(H, F, bias=False).named_parameters()] == ["weight"]
    assert [n for n, _ in RowParallelLinear(F, H, bias=False).named_parameters()] == ["weight"]


def test_rejects_indivisible_sizes():
    group = Group((0, 1, 2), 0)
    with pytest.raises(ValueError, match="output_size must be a multiple of --model-parallel-size, got 8 and 3"):
        ColumnParallelLinear(H, F, group=group)
    with pytest.raises(ValueError, match="input_size must be a multiple of --model-parallel-size, got 8 and 3"):
        RowParallelLinear(F, H, group=group)

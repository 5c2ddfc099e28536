"""Adafactor: torch's, the paper's formula, and what it does to weights that no gradient reaches."""

from __future__ import annotations

import pytest
import torch

from megatron.errors import ConfigError
from megatron.mpu.groups import Group
from megatron.mpu.shard import Shard, set_shard
from megatron.optim import build_optimizer
from megatron.optim.param_groups import LEAST_WEIGHT, MATRIX_EPS, VECTOR_EPS, decay_groups
from tests.optim.test_mixed_precision import loss_of, weights

LR = 1e-2


def run_ours(parameters, steps, factor=1.0, **settings):
    optimizer = build_optimizer(parameters, name="adafactor", **{"lr": LR, "weight_decay": 0.1, **settings})
    for step in range(steps):
        loss_of(parameters, step, factor).backward()
        optimizer.step()
    return optimizer


def test_fp32_without_clipping_is_torchs_adafactor_bit_for_bit():
    ours, theirs = weights(), weights()
    run_ours(ours, 10)
    matrices, vectors = decay_groups(theirs, 0.1)
    matrices["eps"], vectors["eps"] = (MATRIX_EPS, LEAST_WEIGHT), (VECTOR_EPS, LEAST_WEIGHT)
    optimizer = torch.optim.Adafactor([matrices, vectors], lr=LR)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(theirs, step).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def paper_step(weight, gradient, rows, columns, n, lr):
    """One step of algorithm 4 of Shazeer and Stern on a matrix, with T5's settings; rows and columns are sums."""
    decay = 1.0 - n**-0.8
    square = gradient.square() + 1e-30
    rows = decay * rows + (1 - decay) * square.sum(dim=1)
    columns = decay * columns + (1 - decay) * square.sum(dim=0)
    update = gradient / (rows[:, None] * columns[None, :] / rows.sum()).sqrt()
    update = update / max(1.0, update.square().mean().sqrt().item())
    scale = max(1e-3, weight.square().mean().sqrt().item())
    return weight - lr * scale * update, rows, columns


@pytest.mark.parametrize("factor", [1.0, 1e-8], ids=["gradients of 1", "gradients of 1e-8"])
def test_a_matrix_moves_as_the_paper_says_with_gradients_of_any_size(factor):
    """torch's own epsilon would let the running means act no longer at the smaller size."""
    weight = torch.nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    wanted, rows, columns = weight.detach().clone(), torch.zeros(5).double(), torch.zeros(4).double()
    optimizer = build_optimizer([weight], name="adafactor", lr=LR, dtype=torch.float64)
    for n in range(1, 9):
        size = factor * (1.0 if n % 2 else 0.1)  # such that the update is cut in some steps and not in others
        gradient = size * torch.randn(5, 4, generator=torch.Generator().manual_seed(10 + n), dtype=torch.float64)
        wanted, rows, columns = paper_step(wanted, gradient, rows, columns, n, LR)
        weight.grad = gradient
        optimizer.step()
        assert (weight - wanted).abs().max() <= 1e-13, n


def test_a_step_moves_a_weight_by_the_rate_times_its_own_size():
    weight = torch.nn.Parameter(torch.full((4, 4), 3.0))
    optimizer = build_optimizer([weight], name="adafactor", lr=LR)
    weight.sum().backward()
    optimizer.step()
    assert torch.allclose(weight, torch.full((4, 4), 3.0 - LR * 3.0), rtol=1e-6)
    optimizer.param_groups[0]["lr"] = 0.0
    before = weight.detach().clone()
    weight.sum().backward()
    optimizer.step()
    assert torch.equal(weight, before), "the rate is the one given"


def test_rows_columns_and_vectors_that_no_gradient_reaches_stay_as_they_are():
    table, bias = torch.nn.Parameter(torch.ones(6, 4)), torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer([table, bias], name="adafactor", lr=LR)
    for _ in range(3):
        (table[:2, :3].sum() * 1e-3).backward()
        optimizer.step()
    assert torch.equal(bias, torch.ones(3))
    assert torch.equal(table[2:], torch.ones(4, 4)) and torch.equal(table[:, 3], torch.ones(6))
    assert (table[:2, :3] < 1).all()


def test_a_vector_does_not_walk_by_rounding():
    """The keys' bias of attention: its gradient is zero in exact arithmetic."""
    bias = torch.nn.Parameter(torch.zeros(4))
    optimizer = build_optimizer([bias], name="adafactor", lr=LR)
    bias.grad = 1e-14 * torch.tensor([1.0, -2.0, 0.5, 3.0])
    optimizer.step()
    assert 0 < bias.detach().abs().max() <= 1e-5 * LR * LEAST_WEIGHT


def test_a_bf16_weight_has_a_master_and_means_in_fp32():
    small, exact = weights(), weights()
    optimizer = run_ours(small, 1, dtype=torch.bfloat16)
    run_ours(exact, 1)
    for parameter, other in zip(small, exact, strict=True):
        master = optimizer.main_param_of(parameter)
        assert parameter.dtype == torch.bfloat16 and master.dtype == torch.float32
        assert all(value.dtype == torch.float32 for value in optimizer.inner.state[master].values())
        assert torch.equal(parameter, master.bfloat16())
        assert (master - other).abs().max() <= 0.05 * LR * other.abs().max() and not torch.equal(master, parameter)


def test_weights_that_are_cut_are_refused_with_what_to_do():
    with pytest.raises(ValueError, match="adafactor requires --model-parallel-size 1, got 2: .* Use --optimizer adamw"):
        build_optimizer([torch.nn.Parameter(torch.ones(2, 2))], name="adafactor", tensor=Group((0, 1), 0))


def test_a_weight_with_padded_rows_is_refused():
    """torch's Adafactor would count them in the size of the weight, that of its update and the columns' means."""
    table = set_shard(torch.nn.Parameter(torch.ones(6, 4)), Shard((5, 4), 0, 0, 5))
    with pytest.raises(ConfigError, match="got 6 rows of which 5 are real. Omit --make-vocab-size-divisible-by"):
        build_optimizer([table], name="adafactor")
    build_optimizer([table], name="adamw")
    build_optimizer([set_shard(table, Shard((6, 4), 0, 0, 6))], name="adafactor")

"""Adafactor: torch's, the paper's formula, and what it does to weights that no gradient reaches."""

from __future__ import annotations

import pytest
import torch

from megatron.errors import ConfigError
from megatron.mpu.groups import Group
from megatron.mpu.shard import Shard, set_shard
from megatron.optim import build_optimizer
from megatron.optim.param_groups import MATRIX_EPS, MIN_WEIGHT_RMS, VECTOR_EPS, decay_groups
from tests.optim.test_mixed_precision import loss_of, weights

LR = 1e-2


def run_optimizer(parameters, steps, factor=1.0, **settings):
    optimizer = build_optimizer(parameters, name="adafactor", **{"lr": LR, "weight_decay": 0.1, **settings})
    for step in range(steps):
        loss_of(parameters, step, factor).backward()
        optimizer.step()
    return optimizer


def test_fp32_without_clipping_is_bitwise_torch_adafactor():
    parameters, reference = weights(), weights()
    run_optimizer(parameters, 10)
    matrices, vectors = decay_groups(reference, 0.1)
    matrices["eps"], vectors["eps"] = (MATRIX_EPS, MIN_WEIGHT_RMS), (VECTOR_EPS, MIN_WEIGHT_RMS)
    optimizer = torch.optim.Adafactor([matrices, vectors], lr=LR)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(reference, step).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, reference, strict=True))


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
def test_matrix_update_matches_paper_for_any_gradient_scale(factor):
    """torch's own epsilon would let the running means act no longer at the smaller size."""
    weight = torch.nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    expected, rows, columns = weight.detach().clone(), torch.zeros(5).double(), torch.zeros(4).double()
    optimizer = build_optimizer([weight], name="adafactor", lr=LR, dtype=torch.float64)
    for n in range(1, 9):
        scale = factor * (1.0 if n % 2 else 0.1)  # such that the update is cut in some steps and not in others
        gradient = scale * torch.randn(5, 4, generator=torch.Generator().manual_seed(10 + n), dtype=torch.float64)
        expected, rows, columns = paper_step(expected, gradient, rows, columns, n, LR)
        weight.grad = gradient
        optimizer.step()
        assert (weight - expected).abs().max() <= 1e-13, n


def test_update_is_rate_times_weight_rms():
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


def test_weights_without_gradients_do_not_move():
    table, bias = torch.nn.Parameter(torch.ones(6, 4)), torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer([table, bias], name="adafactor", lr=LR)
    for _ in range(3):
        (table[:2, :3].sum() * 1e-3).backward()
        optimizer.step()
    assert torch.equal(bias, torch.ones(3))
    assert torch.equal(table[2:], torch.ones(4, 4)) and torch.equal(table[:, 3], torch.ones(6))
    assert (table[:2, :3] < 1).all()


def test_vector_does_not_drift_by_rounding():
    """The keys' bias of attention: its gradient is zero in exact arithmetic."""
    bias = torch.nn.Parameter(torch.zeros(4))
    optimizer = build_optimizer([bias], name="adafactor", lr=LR)
    bias.grad = 1e-14 * torch.tensor([1.0, -2.0, 0.5, 3.0])
    optimizer.step()
    assert 0 < bias.detach().abs().max() <= 1e-5 * LR * MIN_WEIGHT_RMS


def test_bf16_weight_has_fp32_main_param_and_moments():
    bf16_weights, fp32_weights = weights(), weights()
    optimizer = run_optimizer(bf16_weights, 1, dtype=torch.bfloat16)
    run_optimizer(fp32_weights, 1)
    for parameter, fp32_weight in zip(bf16_weights, fp32_weights, strict=True):
        main_param = optimizer.main_param_of(parameter)
        assert parameter.dtype == torch.bfloat16 and main_param.dtype == torch.float32
        assert all(value.dtype == torch.float32 for value in optimizer.inner.state[main_param].values())
        assert torch.equal(parameter, main_param.bfloat16())
        assert (main_param - fp32_weight).abs().max() <= 0.05 * LR * fp32_weight.abs().max() and not torch.equal(
            main_param, parameter
        )


def test_tensor_parallel_weights_are_rejected():
    with pytest.raises(ValueError, match="adafactor requires --model-parallel-size 1, got 2: .* Use --optimizer adamw"):
        build_optimizer([torch.nn.Parameter(torch.ones(2, 2))], name="adafactor", tensor=Group((0, 1), 0))


def test_padded_rows_are_rejected():
    """torch's Adafactor would count them in the size of the weight, that of its update and the columns' means."""
    table = set_shard(torch.nn.Parameter(torch.ones(6, 4)), Shard((5, 4), 0, 0, 5))
    with pytest.raises(ConfigError, match="got 6 rows of which 5 are real. Omit --make-vocab-size-divisible-by"):
        build_optimizer([table], name="adafactor")
    build_optimizer([table], name="adamw")
    build_optimizer([set_shard(table, Shard((6, 4), 0, 0, 6))], name="adafactor")

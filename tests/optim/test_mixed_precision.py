"""The optimizer step in each precision, against torch's optimizers and clipping."""

from __future__ import annotations

import math
from functools import partial
from typing import get_type_hints

import pytest
import torch

from megatron.errors import NumericsError
from megatron.mpu.groups import build_grid
from megatron.mpu.shard import Shard, set_shard
from megatron.mpu.topology import Topology
from megatron.optim import GradScaler, MixedPrecisionOptimizer, build_optimizer
from megatron.optim.param_groups import decay_groups
from tds.deepspeed.optimizers import Gradients, gradients_of
from tds.gradients import GradientSource
from tests.helpers.harness import run_ranks
from tests.helpers.whole import random

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95)}


def weights(dtype=torch.float32):
    return [torch.nn.Parameter(random(seed, *shape).to(dtype)) for seed, shape in ((1, (4, 3)), (2, (3,)), (3, (5, 4)))]


def loss_of(parameters, step, factor=1.0):
    """A loss with a different gradient at each step; the matrices and the vector all take part."""
    a, bias, c = parameters
    x = random(10 + step, 6, 5).to(a.dtype)
    return factor * torch.tanh(x @ c @ a + bias).square().sum()


def run_ours(parameters, steps, factor=1.0, **settings):
    optimizer = build_optimizer(parameters, weight_decay=0.1, **SETTINGS, **settings)
    for step in range(steps):
        loss_of(parameters, step, factor).backward()
        optimizer.step()
    return optimizer


def run_torch(parameters, steps, factor=1.0, clip_grad=0.0):
    optimizer = torch.optim.AdamW(decay_groups(parameters, 0.1), fused=True, **SETTINGS)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(parameters, step, factor).backward()
        if clip_grad:
            norm = torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
        optimizer.step()
    return norm.item() if clip_grad else 0.0


def test_fp32_without_clipping_is_torchs_adamw_bit_for_bit():
    ours, theirs = weights(), weights()
    run_ours(ours, 10)
    run_torch(theirs, 10)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("factor", [5.0, 1e-3], ids=["clipping acts", "clipping has nothing to do"])
def test_clipping_equals_torchs(factor):
    ours, theirs = weights(torch.float64), weights(torch.float64)
    optimizer = run_ours(ours, 10, factor, dtype=torch.float64, clip_grad=0.5)
    norm = run_torch(theirs, 10, factor, clip_grad=0.5)
    assert (norm > 0.5) == (factor > 1)
    assert optimizer._global_grad_norm == pytest.approx(norm, rel=1e-12), "the norm told is the one before clipping"
    assert all((a - b).abs().max() <= 1e-12 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_loss_scale_leaves_no_trace(scale):
    """Powers of two are exact, so even the bits agree."""
    scaled, plain = weights(), weights()
    optimizer = build_optimizer(scaled, scaler=GradScaler(scale=scale), clip_grad=0.5, **SETTINGS)
    other = build_optimizer(plain, clip_grad=0.5, **SETTINGS)
    for step in range(3):
        (loss_of(scaled, step) * optimizer.loss_scale).backward()
        loss_of(plain, step).backward()
        optimizer.step()
        other.step()
        assert optimizer._global_grad_norm == other._global_grad_norm
    assert all(torch.equal(a, b) for a, b in zip(scaled, plain, strict=True))


def one_weight(dtype, value=1.0, n=4, **settings):
    parameter = torch.nn.Parameter(torch.full((n,), value))
    build = partial(torch.optim.SGD, lr=settings.pop("lr", 1.0))
    return parameter, MixedPrecisionOptimizer([{"params": [parameter]}], build, dtype=dtype, **settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_tiny_gradients_add_up_in_fp32(dtype):
    parameter, optimizer = one_weight(dtype)
    scale = 2.0**-10
    (parameter * 1.0).sum().backward()
    for _ in range(1024):  # each is lost beside the first in 16 bits
        (parameter * scale).sum().backward()
    assert parameter.grad is None, "the 16-bit gradient is freed at once"
    assert torch.equal(optimizer.gradient_of(parameter), torch.full((4,), 2.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_pipelines_engine_is_told_of_gradients_what_it_would_find_out_by_itself(dtype):
    """tds.deepspeed.optimizers has a view of each optimizer that DeepSpeed knows; ours brings its own, which says the
    same.
    """
    parameter, optimizer = one_weight(dtype, scaler=GradScaler(4.0))
    source, found = gradients_of(optimizer, 0), Gradients(optimizer)
    assert type(source).__module__ == "megatron.optim.gradients.engine_source"
    for name in (*get_type_hints(GradientSource), "clips_itself"):
        assert getattr(source, name) == getattr(found, name), name
    assert source.loss_scale() == found.loss_scale() == 4.0
    assert torch.equal(source.of(parameter), torch.zeros(4)) and source.of(parameter) is found.of(parameter)
    other = torch.nn.Parameter(torch.ones(2))
    assert source.of(other) is other.grad is found.of(other)
    for clear in (source.after_step, source.forget):
        (parameter * 2.0).sum().backward()
        assert source.of(parameter) is found.of(parameter) and source.of(parameter).sum() == 8.0
        clear()
        assert source.of(parameter).sum() == 0.0


def test_many_tiny_updates_move_a_bf16_weight():
    parameter, optimizer = one_weight(torch.bfloat16, lr=2.0**-12)
    for _ in range(1024):
        parameter.float().sum().backward()
        optimizer.step()
    assert optimizer.main_param_of(parameter).dtype == torch.float32
    assert torch.equal(parameter, torch.full((4,), 0.75, dtype=torch.bfloat16))
    assert torch.equal(optimizer.main_param_of(parameter), torch.full((4,), 0.75))


def test_masters_keep_the_bits_of_the_weights_before_rounding():
    value = 1.0 + 2.0**-20
    parameter, optimizer = one_weight(torch.bfloat16, value)
    assert parameter.dtype == torch.bfloat16
    assert torch.equal(optimizer.main_param_of(parameter), torch.full((4,), value))


def dynamic(**changes):
    return GradScaler(**{"scale": 2.0**16, "is_dynamic": True, "hysteresis": 1, **changes})


def backward(parameter, optimizer, factor=2.0):
    """Leave a gradient of ``factor`` times the loss scale in each element; from 2^16 on fp16 overflows.

    At a loss scale of 2^16 every factor overflows.
    """
    (parameter * factor).sum().float().mul(optimizer.loss_scale).backward()


def test_an_fp16_overflow_skips_the_step_and_halves_the_scale():
    parameter, optimizer = one_weight(torch.float16, scaler=dynamic())
    backward(parameter, optimizer)
    optimizer.step()
    assert optimizer.overflow and optimizer.loss_scale == 2.0**15
    assert torch.equal(parameter, torch.ones(4, dtype=torch.float16))
    assert torch.equal(optimizer.main_param_of(parameter), torch.ones(4))
    assert not optimizer.inner.state, "a skipped step leaves no moments"
    backward(parameter, optimizer, 0.5)
    optimizer.step()
    assert not optimizer.overflow and torch.equal(parameter, torch.full((4,), 0.5, dtype=torch.float16))
    assert optimizer._global_grad_norm == pytest.approx(1.0)


def test_an_overflow_at_the_smallest_scale_says_that_the_gradients_are_not_finite():
    parameter, optimizer = one_weight(torch.float16, scaler=dynamic(scale=2.0, floor=1.0))
    backward(parameter, optimizer, math.inf)
    optimizer.step()  # the scale could still be smaller: skipped
    assert optimizer.overflow and optimizer.loss_scale == 1.0
    backward(parameter, optimizer, math.inf)
    message = r"overflow at the smallest loss scale \(1\); the gradients themselves are not finite"
    with pytest.raises(NumericsError, match=message):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(4, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_raises_with_the_weights_as_they_were(dtype, bad):
    parameter, optimizer = one_weight(dtype, clip_grad=1.0)
    (parameter * bad).sum().backward()
    with pytest.raises(NumericsError, match=f"norm must be finite, got {bad}. The step did not change"):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(4, dtype=dtype))


def test_a_fixed_scale_that_overflows_raises():
    parameter, optimizer = one_weight(torch.float16, scaler=GradScaler(scale=2.0**16))
    backward(parameter, optimizer)
    with pytest.raises(NumericsError, match="must not overflow at the fixed --loss-scale 65536"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_no_loss_reached_has_a_gradient_of_zeros(dtype):
    parameter, optimizer = one_weight(dtype, lr=1.0)
    assert torch.equal(optimizer.gradient_of(parameter), torch.zeros(4))
    optimizer.step()
    assert optimizer._global_grad_norm == 0.0 and torch.equal(parameter, torch.ones(4, dtype=dtype))


def test_gradients_are_forgotten_after_a_step():
    for dtype in (torch.float32, torch.bfloat16):
        parameter, optimizer = one_weight(dtype)
        parameter.sum().backward()
        optimizer.step()
        assert torch.equal(optimizer.gradient_of(parameter), torch.zeros(4))


# A replica of 2 stages x 2 tensor ranks; in each stage a cut matrix and a bias, and one tied table on both.
def stage_weights(stage):
    return {"tied": random(30, 8, 3), "cut": random(31 + stage, 6, 4), "bias": random(41 + stage, 5)}


def stage_gradients(stage, step):
    return {
        "tied": random(60 + step, 8, 3),
        "cut": random(70 + 10 * stage + step, 6, 4),
        "bias": random(90 + 10 * stage + step, 5),
    }


SHAPES = {"tied": (8, 3), "cut": (6, 4), "bias": (5,)}


def clipped_steps(rank, size, clip_grad):
    """Three steps on this rank's parts with gradients that are given; return the norms and the parts."""
    grid = build_grid(Topology.of_world(size, tensor=2, pipe=2), rank)
    stage, t = grid.pipe.rank, grid.tensor.rank
    shards = {n: Shard(s, 0, t * s[0] // 2, s[0] // 2) if len(s) == 2 else Shard(s) for n, s in SHAPES.items()}
    mine = {
        name: set_shard(torch.nn.Parameter(shards[name].cut(whole).clone()), shards[name])
        for name, whole in stage_weights(stage).items()
    }
    mine["tied"].ds_pipe_replicated = stage == 1
    optimizer = build_optimizer(
        mine.values(), dtype=torch.float64, clip_grad=clip_grad, model=grid.model, tensor=grid.tensor, **SETTINGS
    )
    norms = []
    for step in range(3):
        for name, gradient in stage_gradients(stage, step).items():
            mine[name].grad = shards[name].cut(gradient).clone()
        optimizer.step()
        norms.append(optimizer._global_grad_norm)
    return norms, {name: (shards[name], p.detach()) for name, p in mine.items()}


def serial_steps(clip_grad):
    parameters = {("tied", 0): torch.nn.Parameter(stage_weights(0)["tied"].clone())}
    for stage in (0, 1):
        for name in ("cut", "bias"):
            parameters[name, stage] = torch.nn.Parameter(stage_weights(stage)[name].clone())
    optimizer = torch.optim.AdamW(decay_groups(parameters.values(), 0.0), fused=True, **SETTINGS)
    norms = []
    for step in range(3):
        for (name, stage), parameter in parameters.items():
            parameter.grad = stage_gradients(stage, step)[name].clone()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), clip_grad).item())
        optimizer.step()
    return norms, {key: parameter.detach() for key, parameter in parameters.items()}


def test_norm_and_clipped_steps_over_two_stages_of_two_ranks_equal_one_process():
    norms, expected = serial_steps(0.7)
    for rank, (rank_norms, parts) in enumerate(run_ranks(4, clipped_steps, 4, 0.7)):
        assert rank_norms == pytest.approx(norms, rel=1e-13)
        for name, (shard, part) in parts.items():
            whole = expected[name, 0 if name == "tied" else rank // 2]
            assert (part - shard.cut(whole)).abs().max() <= 1e-12, (rank, name)


def overflow_on_one_rank(rank, size):
    grid = build_grid(Topology.of_world(size, tensor=2, pipe=2), rank)
    parameter, optimizer = one_weight(
        torch.float16, scaler=dynamic(scale=2.0**15), model=grid.model, tensor=grid.tensor
    )
    set_shard(parameter, Shard((8,), 0, 4 * grid.tensor.rank, 4))
    backward(parameter, optimizer, 2.0 if rank == 3 else 0.25)
    assert bool(optimizer.gradient_of(parameter).isfinite().all()) == (rank != 3)
    optimizer.step()
    return optimizer.overflow, optimizer.loss_scale, parameter.tolist()


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    assert run_ranks(4, overflow_on_one_rank, 4) == [(True, 2.0**14, [1.0] * 4)] * 4


def test_a_norm_that_was_asked_for_ahead_is_of_the_gradients_that_lie_there():
    parameter, optimizer = one_weight(torch.float32)
    backward(parameter, optimizer, 3.0)
    optimizer.raw_norm = optimizer.norm_of_sums().item()
    optimizer.gradient_factor = 0.5
    wanted = optimizer.raw_norm * 0.5
    optimizer.step()
    assert optimizer.grad_norm == wanted > 0
    backward(parameter, optimizer, 3.0)
    optimizer.raw_norm = 7.0
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.grad_norm == 0.0, "what was thrown away has no norm"

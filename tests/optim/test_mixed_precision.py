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
from tds.deepspeed.optimizers import Gradients, gradient_source_for
from tds.gradients import GradientSource
from tests.helpers.harness import run_ranks
from tests.helpers.whole import random_tensor

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95)}


def weights(dtype=torch.float32):
    return [
        torch.nn.Parameter(random_tensor(seed, *shape).to(dtype))
        for seed, shape in ((1, (4, 3)), (2, (3,)), (3, (5, 4)))
    ]


def loss_of(parameters, step, factor=1.0):
    """A loss with a different gradient at each step; the matrices and the vector all take part."""
    a, bias, c = parameters
    x = random_tensor(10 + step, 6, 5).to(a.dtype)
    return factor * torch.tanh(x @ c @ a + bias).square().sum()


def run_optimizer(parameters, steps, factor=1.0, **settings):
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


def test_fp32_without_clipping_is_bitwise_torch_adamw():
    parameters, reference = weights(), weights()
    run_optimizer(parameters, 10)
    run_torch(reference, 10)
    assert all(torch.equal(a, b) for a, b in zip(parameters, reference, strict=True))


@pytest.mark.parametrize("factor", [5.0, 1e-3], ids=["clipping acts", "clipping has nothing to do"])
def test_clipping_matches_torch(factor):
    parameters, reference = weights(torch.float64), weights(torch.float64)
    optimizer = run_optimizer(parameters, 10, factor, dtype=torch.float64, clip_grad=0.5)
    norm = run_torch(reference, 10, factor, clip_grad=0.5)
    assert (norm > 0.5) == (factor > 1)
    assert optimizer._global_grad_norm == pytest.approx(norm, rel=1e-12), "the norm told is the one before clipping"
    assert all((a - b).abs().max() <= 1e-12 for a, b in zip(parameters, reference, strict=True))


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_loss_scale_does_not_change_result(scale):
    """Powers of two are exact, so even the bits agree."""
    scaled, plain = weights(), weights()
    optimizer = build_optimizer(scaled, scaler=GradScaler(scale=scale), clip_grad=0.5, **SETTINGS)
    plain_optimizer = build_optimizer(plain, clip_grad=0.5, **SETTINGS)
    for step in range(3):
        (loss_of(scaled, step) * optimizer.loss_scale).backward()
        loss_of(plain, step).backward()
        optimizer.step()
        plain_optimizer.step()
        assert optimizer._global_grad_norm == plain_optimizer._global_grad_norm
    assert all(torch.equal(a, b) for a, b in zip(scaled, plain, strict=True))


def make_one_weight_optimizer(dtype, value=1.0, n=4, **settings):
    parameter = torch.nn.Parameter(torch.full((n,), value))
    build = partial(torch.optim.SGD, lr=settings.pop("lr", 1.0))
    return parameter, MixedPrecisionOptimizer([{"params": [parameter]}], build, dtype=dtype, **settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiny_gradients_accumulate_in_fp32(dtype):
    parameter, optimizer = make_one_weight_optimizer(dtype)
    scale = 2.0**-10
    (parameter * 1.0).sum().backward()
    for _ in range(1024):  # each is lost beside the first in 16 bits
        (parameter * scale).sum().backward()
    assert parameter.grad is None, "the 16-bit gradient is freed at once"
    assert torch.equal(optimizer.gradient_of(parameter), torch.full((4,), 2.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradient_source_matches_generic_view(dtype):
    """tds.deepspeed.optimizers has a view of each optimizer that DeepSpeed knows; ours brings its own, which says the
    same.
    """
    parameter, optimizer = make_one_weight_optimizer(dtype, scaler=GradScaler(4.0))
    source, generic_view = gradient_source_for(optimizer, 0), Gradients(optimizer)
    assert type(source).__module__ == "megatron.optim.gradients.engine_source"
    for name in (*get_type_hints(GradientSource), "clips_in_step"):
        assert getattr(source, name) == getattr(generic_view, name), name
    assert source.loss_scale() == generic_view.loss_scale() == 4.0
    assert torch.equal(source.gradient_of(parameter), torch.zeros(4)) and source.gradient_of(
        parameter
    ) is generic_view.gradient_of(parameter)
    unmanaged = torch.nn.Parameter(torch.ones(2))
    assert source.gradient_of(unmanaged) is unmanaged.grad is generic_view.gradient_of(unmanaged)
    for clear in (source.after_step, source.discard):
        (parameter * 2.0).sum().backward()
        assert (
            source.gradient_of(parameter) is generic_view.gradient_of(parameter)
            and source.gradient_of(parameter).sum() == 8.0
        )
        clear()
        assert source.gradient_of(parameter).sum() == 0.0


def test_tiny_updates_move_bf16_weight():
    parameter, optimizer = make_one_weight_optimizer(torch.bfloat16, lr=2.0**-12)
    for _ in range(1024):
        parameter.float().sum().backward()
        optimizer.step()
    assert optimizer.main_param_of(parameter).dtype == torch.float32
    assert torch.equal(parameter, torch.full((4,), 0.75, dtype=torch.bfloat16))
    assert torch.equal(optimizer.main_param_of(parameter), torch.full((4,), 0.75))


def test_main_params_keep_unrounded_weights():
    value = 1.0 + 2.0**-20
    parameter, optimizer = make_one_weight_optimizer(torch.bfloat16, value)
    assert parameter.dtype == torch.bfloat16
    assert torch.equal(optimizer.main_param_of(parameter), torch.full((4,), value))


def dynamic_scaler(**changes):
    return GradScaler(**{"scale": 2.0**16, "is_dynamic": True, "hysteresis": 1, **changes})


def backward(parameter, optimizer, factor=2.0):
    """Leave a gradient of ``factor`` times the loss scale in each element; from 2^16 on fp16 overflows.

    At a loss scale of 2^16 every factor overflows.
    """
    (parameter * factor).sum().float().mul(optimizer.loss_scale).backward()


def test_fp16_overflow_skips_step_and_halves_scale():
    parameter, optimizer = make_one_weight_optimizer(torch.float16, scaler=dynamic_scaler())
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


def test_overflow_at_smallest_scale_reports_nonfinite_gradients():
    parameter, optimizer = make_one_weight_optimizer(torch.float16, scaler=dynamic_scaler(scale=2.0, floor=1.0))
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
def test_nonfinite_norm_raises_and_leaves_weights_unchanged(dtype, bad):
    parameter, optimizer = make_one_weight_optimizer(dtype, clip_grad=1.0)
    (parameter * bad).sum().backward()
    with pytest.raises(NumericsError, match=f"norm must be finite, got {bad}. The step did not change"):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(4, dtype=dtype))


def test_fixed_scale_overflow_raises():
    parameter, optimizer = make_one_weight_optimizer(torch.float16, scaler=GradScaler(scale=2.0**16))
    backward(parameter, optimizer)
    with pytest.raises(NumericsError, match="must not overflow at the fixed --loss-scale 65536"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unused_parameter_has_zero_gradient(dtype):
    parameter, optimizer = make_one_weight_optimizer(dtype, lr=1.0)
    assert torch.equal(optimizer.gradient_of(parameter), torch.zeros(4))
    optimizer.step()
    assert optimizer._global_grad_norm == 0.0 and torch.equal(parameter, torch.ones(4, dtype=dtype))


def test_gradients_are_cleared_after_step():
    for dtype in (torch.float32, torch.bfloat16):
        parameter, optimizer = make_one_weight_optimizer(dtype)
        parameter.sum().backward()
        optimizer.step()
        assert torch.equal(optimizer.gradient_of(parameter), torch.zeros(4))


# A replica of 2 stages x 2 tensor ranks; in each stage a cut matrix and a bias, and one tied table on both.
def stage_weights(stage):
    return {
        "tied": random_tensor(30, 8, 3),
        "cut": random_tensor(31 + stage, 6, 4),
        "bias": random_tensor(41 + stage, 5),
    }


def stage_gradients(stage, step):
    return {
        "tied": random_tensor(60 + step, 8, 3),
        "cut": random_tensor(70 + 10 * stage + step, 6, 4),
        "bias": random_tensor(90 + 10 * stage + step, 5),
    }


SHAPES = {"tied": (8, 3), "cut": (6, 4), "bias": (5,)}


def clipped_steps(rank, size, clip_grad):
    """Three steps on this rank's parts with gradients that are given; return the norms and the parts."""
    grid = build_grid(Topology.from_world_size(size, tensor=2, pipe=2), rank)
    stage, t = grid.pipe.rank, grid.tensor.rank
    shards = {n: Shard(s, 0, t * s[0] // 2, s[0] // 2) if len(s) == 2 else Shard(s) for n, s in SHAPES.items()}
    parameters = {
        name: set_shard(torch.nn.Parameter(shards[name].narrow(full_weight).clone()), shards[name])
        for name, full_weight in stage_weights(stage).items()
    }
    parameters["tied"].ds_pipe_replicated = stage == 1
    optimizer = build_optimizer(
        parameters.values(), dtype=torch.float64, clip_grad=clip_grad, model=grid.model, tensor=grid.tensor, **SETTINGS
    )
    norms = []
    for step in range(3):
        for name, gradient in stage_gradients(stage, step).items():
            parameters[name].grad = shards[name].narrow(gradient).clone()
        optimizer.step()
        norms.append(optimizer._global_grad_norm)
    return norms, {name: (shards[name], p.detach()) for name, p in parameters.items()}


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


def test_norm_and_clipped_steps_match_single_process():
    norms, expected = serial_steps(0.7)
    for rank, (rank_norms, shards) in enumerate(run_ranks(4, clipped_steps, 4, 0.7)):
        assert rank_norms == pytest.approx(norms, rel=1e-13)
        for name, (shard, local_weight) in shards.items():
            full_weight = expected[name, 0 if name == "tied" else rank // 2]
            assert (local_weight - shard.narrow(full_weight)).abs().max() <= 1e-12, (rank, name)


def overflow_on_one_rank(rank, size):
    grid = build_grid(Topology.from_world_size(size, tensor=2, pipe=2), rank)
    parameter, optimizer = make_one_weight_optimizer(
        torch.float16, scaler=dynamic_scaler(scale=2.0**15), model=grid.model, tensor=grid.tensor
    )
    set_shard(parameter, Shard((8,), 0, 4 * grid.tensor.rank, 4))
    backward(parameter, optimizer, 2.0 if rank == 3 else 0.25)
    assert bool(optimizer.gradient_of(parameter).isfinite().all()) == (rank != 3)
    optimizer.step()
    return optimizer.overflow, optimizer.loss_scale, parameter.tolist()


def test_overflow_on_one_rank_skips_step_on_all_ranks():
    assert run_ranks(4, overflow_on_one_rank, 4) == [(True, 2.0**14, [1.0] * 4)] * 4


def test_precomputed_norm_is_used_and_discarded_with_gradients():
    parameter, optimizer = make_one_weight_optimizer(torch.float32)
    backward(parameter, optimizer, 3.0)
    optimizer.raw_norm = optimizer.norm_of_sums().item()
    optimizer.gradient_factor = 0.5
    expected = optimizer.raw_norm * 0.5
    optimizer.step()
    assert optimizer.grad_norm == expected > 0
    backward(parameter, optimizer, 3.0)
    optimizer.raw_norm = 7.0
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.grad_norm == 0.0, "what was thrown away has no norm"

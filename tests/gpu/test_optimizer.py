"""Optimizer steps on the device against those of the CPU: AdamW, Adafactor, SGD; masters, offload, scale, clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.errors import NumericsError
from megatron.optim import GradScaler, MixedPrecisionOptimizer, OffloadConfig, build_optimizer
from megatron.training.state_records import make_moments, optimizer_steps, set_optimizer_steps
from tests.gpu.near import name_of, noise

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
SHAPES = ((33, 17), (17,), (5, 64), (1,))
SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "clip_grad": 2.0}


def weights(place: torch.device) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(noise(i, *shape).float().to(place)) for i, shape in enumerate(SHAPES)]


def backward(optimizer: MixedPrecisionOptimizer, parameters: list[torch.nn.Parameter], step: int, part: int) -> None:
    """Give each parameter a gradient that is known, of one micro-batch."""
    total = torch.zeros((), device=parameters[0].device)
    for i, parameter in enumerate(parameters):
        factor = noise(100 * step + 10 * part + i, *parameter.shape, dtype=torch.bfloat16).float()
        total = total + (parameter.float() * factor.to(parameter.device)).sum()
    (total * optimizer.loss_scale).backward()
    optimizer.end_micro_batch()


def stepped(place: torch.device, steps: int = 4, **settings: Any) -> tuple[MixedPrecisionOptimizer, list[Any]]:
    """Return the optimizer after some steps of two micro-batches each, and its parameters."""
    parameters = weights(place)
    optimizer = build_optimizer(parameters, **{**SETTINGS, **settings})
    for step in range(steps):
        for part in range(2):
            backward(optimizer, parameters, step, part)
        optimizer.step()
    return optimizer, parameters


def masters(optimizer: MixedPrecisionOptimizer, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [optimizer.main_param_of(parameter).detach() for parameter in parameters]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("name", ["adamw", "adafactor", "sgd"])
def test_masters_move_as_on_the_cpu(name: str, dtype: torch.dtype, place: torch.device) -> None:
    """Gradients are numbers of 8 bits, whose sums fp32 holds: what differs is the update's own rounding."""
    settings = {"name": name, "dtype": dtype}
    ours, own = stepped(place, **settings)
    theirs, others = stepped(CPU, **settings)
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6) and ours.grad_norm > SETTINGS["clip_grad"]
    for found, wanted, start in zip(masters(ours, own), masters(theirs, others), weights(CPU), strict=True):
        assert found.device.type == place.type and found.dtype == torch.promote_types(dtype, torch.float32)
        moved = (wanted - start.detach()).abs().max()
        assert moved > 1e-4, "it has to move at all"
        assert (found.cpu() - wanted).abs().max() <= 5e-5 * moved + 1e-6 * wanted.abs().max()
    for parameter, master in zip(own, masters(ours, own), strict=True):
        assert parameter.dtype == dtype and torch.equal(parameter.detach(), master.to(dtype)), "rounded, to the bit"


def test_adamw_is_torchs_fused_one_and_its_moments_stay_on_the_device(place: torch.device) -> None:
    optimizer, parameters = stepped(place, dtype=torch.bfloat16)
    assert type(optimizer.inner) is torch.optim.AdamW and all(group["fused"] for group in optimizer.param_groups)
    for master in masters(optimizer, parameters):
        state = optimizer.inner.state[next(p for p in optimizer.inner.state if p.data_ptr() == master.data_ptr())]
        assert {state[key].device.type for key in ("exp_avg", "exp_avg_sq")} == {place.type}
        assert {state[key].dtype for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    assert optimizer_steps(optimizer) == 4
    set_optimizer_steps(optimizer, 9)
    assert optimizer_steps(optimizer) == 9


def test_moments_that_a_resume_makes_move_no_weight(place: torch.device) -> None:
    parameters = weights(place)
    optimizer = build_optimizer(parameters, **SETTINGS)
    before = [parameter.detach().clone() for parameter in parameters]
    make_moments(optimizer)
    assert len(optimizer.inner.state) == len(SHAPES)
    assert all(torch.equal(parameter, kept) for parameter, kept in zip(parameters, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_with_offload_masters_are_on_the_host_and_weights_follow(dtype: torch.dtype, place: torch.device) -> None:
    optimizer, parameters = stepped(place, dtype=dtype, offload=OffloadConfig(optimizer=True))
    _, others = stepped(CPU, dtype=dtype)
    for parameter, master, other in zip(parameters, masters(optimizer, parameters), others, strict=True):
        assert master.device.type == "cpu" and parameter.device.type == place.type
        assert master.is_pinned() == (place.type == "cuda")
        assert torch.equal(parameter.detach().cpu(), master.to(dtype)), "the copy was waited for"
        assert (parameter.detach().cpu().float() - other.detach().float()).abs().max() <= 0.01


def test_an_overflow_of_fp16_skips_the_step_and_halves_the_scale(place: torch.device) -> None:
    parameters = weights(place)
    scaler = GradScaler(scale=2.0**8, is_dynamic=True, window=2, hysteresis=1)
    optimizer = build_optimizer(parameters, dtype=torch.float16, scaler=scaler, **SETTINGS)
    backward(optimizer, parameters, 0, 0)
    optimizer.step()
    assert not optimizer.overflow and math.isfinite(optimizer.grad_norm)
    before = [parameter.detach().clone() for parameter in parameters]
    (parameters[0].float().sum() * 1e7).backward()  # beyond what fp16 holds
    optimizer.end_micro_batch()
    optimizer.step()
    assert optimizer.overflow and optimizer.loss_scale == 2.0**7
    assert all(torch.equal(parameter, kept) for parameter, kept in zip(parameters, before, strict=True))
    for step in (1, 2):
        backward(optimizer, parameters, step, 0)
        optimizer.step()
    assert not optimizer.overflow and optimizer.loss_scale == 2.0**8
    assert not any(torch.equal(parameter, kept) for parameter, kept in zip(parameters, before, strict=True))


def test_the_loss_scale_leaves_no_trace_and_a_norm_that_is_no_number_ends_the_run(place: torch.device) -> None:
    _, plain = stepped(place)
    _, scaled = stepped(place, scaler=GradScaler(scale=1024.0))
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True)), "powers of two are exact"
    optimizer, parameters = stepped(place)
    before = [parameter.detach().clone() for parameter in parameters]
    (parameters[1].sum() * math.nan).backward()
    optimizer.end_micro_batch()
    with pytest.raises(NumericsError, match="must be finite, got nan"):
        optimizer.step()
    assert all(torch.equal(parameter, kept) for parameter, kept in zip(parameters, before, strict=True))

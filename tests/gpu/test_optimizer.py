"""Optimizer steps on the device against those of the CPU: AdamW, Adafactor, SGD; masters, offload, scale, clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.errors import NumericsError
from megatron.optim import GradScaler, MixedPrecisionOptimizer, OffloadConfig, build_optimizer
from megatron.training.state_records import make_moments, optimizer_steps, set_optimizer_steps
from tests.gpu.near import name_of, random_values

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
SHAPES = ((33, 17), (17,), (5, 64), (1,))
SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "clip_grad": 2.0}


def weights(torch_device: torch.device) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(random_values(i, *shape).float().to(torch_device)) for i, shape in enumerate(SHAPES)]


def backward(
    optimizer: MixedPrecisionOptimizer, parameters: list[torch.nn.Parameter], step: int, micro_batch_idx: int
) -> None:
    """Give each parameter a gradient that is known, of one micro-batch."""
    total = torch.zeros((), device=parameters[0].device)
    for i, parameter in enumerate(parameters):
        factor = random_values(100 * step + 10 * micro_batch_idx + i, *parameter.shape, dtype=torch.bfloat16).float()
        total = total + (parameter.float() * factor.to(parameter.device)).sum()
    (total * optimizer.loss_scale).backward()
    optimizer.end_micro_batch()


def run_steps(torch_device: torch.device, steps: int = 4, **settings: Any) -> tuple[MixedPrecisionOptimizer, list[Any]]:
    """Return the optimizer after some steps of two micro-batches each, and its parameters."""
    parameters = weights(torch_device)
    optimizer = build_optimizer(parameters, **{**SETTINGS, **settings})
    for step in range(steps):
        for micro_batch_idx in range(2):
            backward(optimizer, parameters, step, micro_batch_idx)
        optimizer.step()
    return optimizer, parameters


def main_params(optimizer: MixedPrecisionOptimizer, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [optimizer.main_param_of(parameter).detach() for parameter in parameters]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("name", ["adamw", "adafactor", "sgd"])
def test_main_params_match_cpu_updates(name: str, dtype: torch.dtype, torch_device: torch.device) -> None:
    """Gradients are numbers of 8 bits, whose sums fp32 holds: what differs is the update's own rounding."""
    settings = {"name": name, "dtype": dtype}
    optimizer, parameters = run_steps(torch_device, **settings)
    cpu_optimizer, cpu_parameters = run_steps(CPU, **settings)
    assert (
        optimizer.grad_norm == pytest.approx(cpu_optimizer.grad_norm, rel=1e-6)
        and optimizer.grad_norm > SETTINGS["clip_grad"]
    )
    for actual, expected, start in zip(
        main_params(optimizer, parameters), main_params(cpu_optimizer, cpu_parameters), weights(CPU), strict=True
    ):
        assert actual.device.type == torch_device.type and actual.dtype == torch.promote_types(dtype, torch.float32)
        max_update = (expected - start.detach()).abs().max()
        assert max_update > 1e-4, "it has to move at all"
        assert (actual.cpu() - expected).abs().max() <= 5e-5 * max_update + 1e-6 * expected.abs().max()
    for parameter, main_param in zip(parameters, main_params(optimizer, parameters), strict=True):
        assert parameter.dtype == dtype and torch.equal(parameter.detach(), main_param.to(dtype)), "rounded, to the bit"


def test_adamw_is_fused_and_moments_stay_on_device(torch_device: torch.device) -> None:
    optimizer, parameters = run_steps(torch_device, dtype=torch.bfloat16)
    assert type(optimizer.inner) is torch.optim.AdamW and all(group["fused"] for group in optimizer.param_groups)
    for main_param in main_params(optimizer, parameters):
        state = optimizer.inner.state[next(p for p in optimizer.inner.state if p.data_ptr() == main_param.data_ptr())]
        assert {state[key].device.type for key in ("exp_avg", "exp_avg_sq")} == {torch_device.type}
        assert {state[key].dtype for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    assert optimizer_steps(optimizer) == 4
    set_optimizer_steps(optimizer, 9)
    assert optimizer_steps(optimizer) == 9


def test_making_moments_moves_no_weight(torch_device: torch.device) -> None:
    parameters = weights(torch_device)
    optimizer = build_optimizer(parameters, **SETTINGS)
    before = [parameter.detach().clone() for parameter in parameters]
    make_moments(optimizer)
    assert len(optimizer.inner.state) == len(SHAPES)
    assert all(torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_offloaded_main_params_are_on_host_and_update_weights(dtype: torch.dtype, torch_device: torch.device) -> None:
    optimizer, parameters = run_steps(torch_device, dtype=dtype, offload=OffloadConfig(optimizer=True))
    _, cpu_parameters = run_steps(CPU, dtype=dtype)
    for parameter, main_param, cpu_parameter in zip(
        parameters, main_params(optimizer, parameters), cpu_parameters, strict=True
    ):
        assert main_param.device.type == "cpu" and parameter.device.type == torch_device.type
        assert main_param.is_pinned() == (torch_device.type == "cuda")
        assert torch.equal(parameter.detach().cpu(), main_param.to(dtype)), "the copy was waited for"
        assert (parameter.detach().cpu().float() - cpu_parameter.detach().float()).abs().max() <= 0.01


def test_fp16_overflow_skips_step_and_halves_scale(torch_device: torch.device) -> None:
    parameters = weights(torch_device)
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
    assert all(torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True))
    for step in (1, 2):
        backward(optimizer, parameters, step, 0)
        optimizer.step()
    assert not optimizer.overflow and optimizer.loss_scale == 2.0**8
    assert not any(torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True))


def test_loss_scale_is_exact_and_nonfinite_norm_raises(torch_device: torch.device) -> None:
    _, plain = run_steps(torch_device)
    _, scaled = run_steps(torch_device, scaler=GradScaler(scale=1024.0))
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True)), "powers of two are exact"
    optimizer, parameters = run_steps(torch_device)
    before = [parameter.detach().clone() for parameter in parameters]
    (parameters[1].sum() * math.nan).backward()
    optimizer.end_micro_batch()
    with pytest.raises(NumericsError, match="must be finite, got nan"):
        optimizer.step()
    assert all(torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True))

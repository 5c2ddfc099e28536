"""The guard's word on each step, which is agreed on the device and read from it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config.stability import StabilityConfig
from megatron.mpu.groups import SINGLE
from megatron.optim import build_optimizer

pytestmark = pytest.mark.gpu


def make_guard(torch_device: torch.device) -> tuple[Any, Any, torch.nn.Parameter]:
    """Return a guard that skips bad steps, its optimizer and the one weight."""
    from megatron.training.callbacks.stability_guard import StabilityGuard  # DeepSpeed comes with it

    weight = torch.nn.Parameter(torch.ones(4, 4, device=torch_device))
    optimizer = build_optimizer([weight], lr=0.1)
    guard = StabilityGuard(StabilityConfig(stability_guard="skip"))
    guard.trainer = SimpleNamespace(  # type: ignore[assignment]
        find=lambda callback_type: None,
        progress=SimpleNamespace(step=0),
        engine=SimpleNamespace(optimizer=optimizer),
        world=SimpleNamespace(rank=1, decision_group=(SINGLE, torch_device)),  # rank 0 writes a journal
    )
    guard.on_train_start()
    return guard, optimizer, weight


def run_step(guard: Any, optimizer: Any, weight: torch.nn.Parameter, factor: float) -> None:
    loss = (weight * factor).sum()
    loss.backward()
    optimizer.end_micro_batch()
    guard.on_before_update(loss.item())
    optimizer.step()


def test_guard_skips_anomalous_steps_bitwise(torch_device: torch.device) -> None:
    guard, optimizer, weight = make_guard(torch_device)
    run_step(guard, optimizer, weight, 1.0)
    assert (
        guard.last_checked == (16.0, 4.0)
        and not optimizer.was_rejected
        and not torch.equal(weight, torch.ones_like(weight))
    )
    before = weight.detach().clone()
    run_step(guard, optimizer, weight, math.nan)
    assert optimizer.was_rejected and torch.equal(weight, before)
    assert guard.last_checked[0] == math.inf and math.isnan(guard.last_checked[1])
    loss = weight.sum()
    (loss * math.inf).backward()  # a sound loss with gradients that are none
    optimizer.end_micro_batch()
    guard.on_before_update(loss.item())
    optimizer.step()
    assert optimizer.was_rejected and torch.equal(weight, before) and guard.last_checked[1] == math.inf
    run_step(guard, optimizer, weight, 1.0)
    assert not optimizer.was_rejected and not torch.equal(weight, before)

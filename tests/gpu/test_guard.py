"""The guard's word on each step, which is agreed on the device and read from it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config.run import StabilityConfig
from megatron.mpu.groups import SINGLE
from megatron.optim import build_optimizer

pytestmark = pytest.mark.gpu


def guarded(place: torch.device) -> tuple[Any, Any, Any, torch.nn.Parameter]:
    """Return a guard that skips bad steps, its engine, optimizer and the one weight."""
    from megatron.training.callbacks.stability_guard import StabilityGuard  # DeepSpeed comes with it

    weight = torch.nn.Parameter(torch.ones(4, 4, device=place))
    optimizer = build_optimizer([weight], lr=0.1)
    engine = SimpleNamespace(optimizer=optimizer, on_loss=None)
    guard = StabilityGuard(StabilityConfig(stability_guard="skip"))
    guard.watch(engine, SINGLE, place, 0)  # type: ignore[arg-type]
    return guard, engine, optimizer, weight


def take(engine: Any, optimizer: Any, weight: torch.nn.Parameter, factor: float) -> None:
    loss = (weight * factor).sum()
    loss.backward()
    optimizer.end_micro_batch()
    engine.on_loss(loss.item())
    optimizer.step()


def test_a_good_step_moves_and_a_bad_one_leaves_the_weights_to_the_bit(place: torch.device) -> None:
    guard, engine, optimizer, weight = guarded(place)
    take(engine, optimizer, weight, 1.0)
    assert guard.seen == (16.0, 4.0) and not optimizer.was_refused and not torch.equal(weight, torch.ones_like(weight))
    before = weight.detach().clone()
    take(engine, optimizer, weight, math.nan)
    assert optimizer.was_refused and torch.equal(weight, before)
    assert guard.seen[0] == math.inf and math.isnan(guard.seen[1])
    loss = weight.sum()
    (loss * math.inf).backward()  # a sound loss with gradients that are none
    optimizer.end_micro_batch()
    engine.on_loss(loss.item())
    optimizer.step()
    assert optimizer.was_refused and torch.equal(weight, before) and guard.seen[1] == math.inf
    take(engine, optimizer, weight, 1.0)
    assert not optimizer.was_refused and not torch.equal(weight, before)

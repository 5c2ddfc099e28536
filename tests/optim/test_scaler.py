"""The loss scale: when it doubles, when it halves, and what a checkpoint keeps of it."""

from __future__ import annotations

import random

from deepspeed.runtime.fp16 import loss_scaler

from megatron.optim import GradScaler


def dynamic_scaler(**changes):
    return GradScaler(**{"scale": 16.0, "is_dynamic": True, "window": 3, "hysteresis": 1, "floor": 1.0, **changes})


def scales_after(scaler, overflows):
    """Return the scale after each of these steps."""
    scales = []
    for has_overflow in overflows:
        scaler.update(bool(has_overflow))
        scales.append(scaler.scale)
    return scales


def test_scale_doubles_after_each_window():
    assert scales_after(dynamic_scaler(), [0] * 7) == [16, 16, 32, 32, 32, 64, 64]


def test_overflow_halves_scale_and_restarts_window():
    assert scales_after(dynamic_scaler(), [0, 0, 1, 0, 0, 0]) == [16, 16, 8, 8, 8, 16]


def test_hysteresis_tolerates_overflows():
    assert scales_after(dynamic_scaler(hysteresis=2), [1, 1, 1, 1]) == [16, 8, 4, 2]
    assert scales_after(dynamic_scaler(hysteresis=3), [1, 1, 1, 1]) == [16, 16, 8, 4]


def test_scales_after_overflows_match_deepspeed(monkeypatch):
    """Within a window: DeepSpeed doubles one good step later than its window says, which Megatron and we do not."""
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)
    rng = random.Random(5)
    for hysteresis in (1, 2, 4, 9):
        reference = loss_scaler.DynamicLossScaler(2.0**30, 1000, 1.0, hysteresis, False)
        steps, expected = [rng.random() < 0.2 for _ in range(60)], []
        for step in steps:
            reference.update_scale(step)
            expected.append(reference.cur_scale)
        assert scales_after(dynamic_scaler(scale=2.0**30, hysteresis=hysteresis, window=1000), steps) == expected


def test_only_full_window_restores_hysteresis():
    assert scales_after(dynamic_scaler(hysteresis=2), [1, 0, 1, 0, 1]) == [16, 16, 8, 8, 4]
    assert scales_after(dynamic_scaler(hysteresis=2), [1, 0, 0, 0, 1]) == [16, 16, 16, 32, 32]


def test_scale_does_not_fall_below_floor():
    assert scales_after(dynamic_scaler(scale=4.0, floor=2.0), [1, 1, 1]) == [2, 2, 2]


def test_scale_is_to_blame_only_above_floor():
    assert dynamic_scaler(scale=4.0, floor=2.0).can_decrease
    assert not dynamic_scaler(scale=2.0, floor=2.0).can_decrease
    assert not GradScaler(scale=128.0).can_decrease


def test_fixed_scale_is_constant():
    assert scales_after(GradScaler(scale=128.0, window=1), [0, 1, 0, 1]) == [128] * 4
    assert GradScaler().scale == 1.0


def test_resumed_state_equals_uninterrupted():
    steps = [0, 1, 0, 0, 1, 0, 0, 0, 1, 1, 0]
    for resume_step in range(len(steps)):
        first, second = dynamic_scaler(hysteresis=2), dynamic_scaler(hysteresis=2, scale=1024.0)
        first_scales = scales_after(first, steps[:resume_step])
        second.load(first.state())
        assert first_scales + scales_after(second, steps[resume_step:]) == scales_after(
            dynamic_scaler(hysteresis=2), steps
        )

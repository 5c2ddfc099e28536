"""The loss scale: when it doubles, when it halves, and what a checkpoint keeps of it."""

from __future__ import annotations

import random

from deepspeed.runtime.fp16 import loss_scaler

from megatron.optim import GradScaler


def dynamic(**changes):
    return GradScaler(**{"scale": 16.0, "is_dynamic": True, "window": 3, "hysteresis": 1, "floor": 1.0, **changes})


def after(scaler, overflows):
    """Return the scale after each of these steps."""
    seen = []
    for has_overflow in overflows:
        scaler.update(bool(has_overflow))
        seen.append(scaler.scale)
    return seen


def test_it_doubles_after_every_window_of_good_steps():
    assert after(dynamic(), [0] * 7) == [16, 16, 32, 32, 32, 64, 64]


def test_it_halves_at_an_overflow_and_the_window_starts_anew():
    assert after(dynamic(), [0, 0, 1, 0, 0, 0]) == [16, 16, 8, 8, 8, 16]


def test_hysteresis_lets_some_overflows_pass():
    assert after(dynamic(hysteresis=2), [1, 1, 1, 1]) == [16, 8, 4, 2]
    assert after(dynamic(hysteresis=3), [1, 1, 1, 1]) == [16, 16, 8, 4]


def test_every_overflow_is_answered_as_deepspeed_does(monkeypatch):
    """Within a window: DeepSpeed doubles one good step later than its window says, which Megatron and we do not."""
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)
    chance = random.Random(5)
    for hysteresis in (1, 2, 4, 9):
        theirs = loss_scaler.DynamicLossScaler(2.0**30, 1000, 1.0, hysteresis, False)
        steps, wanted = [chance.random() < 0.2 for _ in range(60)], []
        for step in steps:
            theirs.update_scale(step)
            wanted.append(theirs.cur_scale)
        assert after(dynamic(scale=2.0**30, hysteresis=hysteresis, window=1000), steps) == wanted


def test_a_few_good_steps_do_not_renew_the_hysteresis_but_a_window_does():
    assert after(dynamic(hysteresis=2), [1, 0, 1, 0, 1]) == [16, 16, 8, 8, 4]
    assert after(dynamic(hysteresis=2), [1, 0, 0, 0, 1]) == [16, 16, 16, 32, 32]


def test_it_does_not_fall_below_the_floor():
    assert after(dynamic(scale=4.0, floor=2.0), [1, 1, 1]) == [2, 2, 2]


def test_it_is_to_blame_only_while_it_could_be_smaller():
    assert dynamic(scale=4.0, floor=2.0).is_to_blame
    assert not dynamic(scale=2.0, floor=2.0).is_to_blame
    assert not GradScaler(scale=128.0).is_to_blame


def test_a_fixed_scale_stays():
    assert after(GradScaler(scale=128.0, window=1), [0, 1, 0, 1]) == [128] * 4
    assert GradScaler().scale == 1.0


def test_going_on_from_its_state_equals_no_stop():
    steps = [0, 1, 0, 0, 1, 0, 0, 0, 1, 1, 0]
    for cut in range(len(steps)):
        first, second = dynamic(hysteresis=2), dynamic(hysteresis=2, scale=1024.0)
        begun = after(first, steps[:cut])
        second.load(first.state())
        assert begun + after(second, steps[cut:]) == after(dynamic(hysteresis=2), steps)

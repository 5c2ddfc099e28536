"""The learning rate: where each style starts, where it ends, and its course between."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import parse
from megatron.config.optimizer import OptimizerConfig
from megatron.config.option import options_of
from megatron.optim import LRScheduler
from megatron.optim.lr_scheduler import INVERSE_SQUARE_ROOT, STYLES
from megatron.training.optimizer_setup import make_lr_scheduler

STYLES_WITH_END = [style for style in STYLES if style != INVERSE_SQUARE_ROOT]
LR, MIN_LR, UPDATES, WARMUP = 1e-2, 1e-4, 100, 0.1
MIDPOINTS = {
    "constant": LR,
    "linear": (LR + MIN_LR) / 2,
    "cosine": (LR + MIN_LR) / 2,
    "exponential": math.sqrt(LR * MIN_LR),
    "wsd": LR,
    "inverse-square-root": LR * math.sqrt(10 / 55),
}
FORMULAS = dict(re.findall(r"^ *\| (\S+) \| (.+) \|$", LRScheduler.__doc__ or "", re.MULTILINE))
"""Style -> its formula, as the table of the class has it."""
every_style = pytest.mark.parametrize("style", STYLES)


def make_schedule(style, **changes):
    return LRScheduler(
        **{"lr": LR, "min_lr": MIN_LR, "style": style, "decay_updates": UPDATES, "warmup": WARMUP, **changes}
    )


@every_style
def test_warmup_rises_linearly_to_lr(style):
    values = [make_schedule(style).at(update) for update in range(10)]
    assert values == pytest.approx([LR * (i + 1) / 10 for i in range(10)], rel=1e-12)


def test_warmup_rises_from_initial_rate_to_lr():
    schedule = make_schedule("linear", warmup_init=2e-3, step_offset=-1)
    assert [schedule.at(update) for update in (0, 5, 10)] == pytest.approx([2e-3, 6e-3, LR], rel=1e-12)
    assert schedule.with_rates(2 * LR, MIN_LR).at(5) == pytest.approx(11e-3, rel=1e-12), "the same start in every group"


@every_style
@pytest.mark.parametrize("warmup", [0.0, WARMUP])
def test_offset_of_minus_one_shifts_curve_by_one_update(style, warmup):
    schedule, shifted = make_schedule(style, warmup=warmup), make_schedule(style, warmup=warmup, step_offset=-1)
    assert [shifted.at(update) for update in range(1, 2 * UPDATES)] == [
        schedule.at(update) for update in range(2 * UPDATES - 1)
    ]
    assert shifted.at(0) == (0.0 if warmup else pytest.approx(LR)), "Megatron's first step"


def test_offset_of_minus_one_counts_samples_before_step():
    schedule = make_schedule("linear", decay_updates=900, warmup_length=100, step_offset=-1)
    assert schedule.after(schedule.position(480, 24)) == pytest.approx(megatron_rate(480, LR, MIN_LR, 100, 900))


@pytest.mark.parametrize("style", STYLES_WITH_END)
def test_last_update_and_later_have_min_lr(style):
    final_rate = LR if style == "constant" else MIN_LR
    for update in (UPDATES - 1, UPDATES, 10 * UPDATES):
        assert make_schedule(style).at(update) == pytest.approx(final_rate, rel=1e-9)
    if style != "constant":
        assert make_schedule(style).at(UPDATES - 2) > MIN_LR * 1.001, "not before the last"


@every_style
def test_first_update_without_warmup_is_on_curve(style):
    first_rate = make_schedule(style, warmup=0.0).at(0)
    assert LR * 0.9 <= first_rate <= LR


def test_every_style_has_flag_choice_formula_and_midpoint():
    flag = next(option for option in options_of(OptimizerConfig) if option.name == "lr_decay_style")
    assert set(flag.choices) == set(STYLES) == set(MIDPOINTS) == FORMULAS.keys() - {"style", "---"}


@every_style
def test_style_depends_only_on_parameters_in_its_formula(style):
    """Beside the warm-up and the number of updates, which all have; a new parameter must stand in a formula."""
    parameters = {field.name: getattr(make_schedule(style), field.name) for field in dataclasses.fields(LRScheduler)}
    del parameters["style"]
    common_parameters = {"decay_updates", "warmup", "warmup_length", "warmup_init", "step_offset"}
    changed_values = {
        "warmup_length": 3,
        "wsd_length": 40,
        "wsd_style": "cosine",
        "step_offset": -1,
        "warmup_init": 1e-3,
    }
    updates = [*range(3 * UPDATES), 10**6]
    baseline = [make_schedule(style).at(update) for update in updates]
    for name, value in parameters.items():
        changed = make_schedule(style, **{name: changed_values[name] if name in changed_values else 5 * value})
        has_changed = [changed.at(update) for update in updates] != baseline
        is_named = name in re.findall(r"\w+", FORMULAS[style]) or name in common_parameters
        assert has_changed == is_named, name
    assert all(any(name in formula for formula in FORMULAS.values()) for name in parameters.keys() - common_parameters)


@pytest.mark.parametrize(("style", "midpoint"), MIDPOINTS.items())
def test_midpoint_of_decay(style, midpoint):
    assert make_schedule(style).at(10 + 45 - 1) == pytest.approx(midpoint, rel=1e-12)


def test_cosine_matches_formula():
    values = [make_schedule("cosine", warmup=0.0).at(update) for update in (24, 74)]
    assert values == pytest.approx(
        [MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * u)) / 2 for u in (0.25, 0.75)], rel=1e-12
    )


def test_wsd_is_constant_before_linear_decay():
    schedule = make_schedule("wsd", warmup=0.0, wsd_decay_fraction=0.2)
    assert {schedule.at(update) for update in range(80)} == {LR}
    assert schedule.at(89) == pytest.approx((LR + MIN_LR) / 2, rel=1e-9)


WSD_FORMULAS = {
    "linear": lambda u: 1 - u,
    "cosine": lambda u: (1 + math.cos(math.pi * u)) / 2,
    "exponential": lambda u: 2 * 0.5**u - 1,
    "minus_sqrt": lambda u: 1 - math.sqrt(u),
}


@pytest.mark.parametrize("style", WSD_FORMULAS)
def test_wsd_styles_match_megatron(style):
    flag = next(option for option in options_of(OptimizerConfig) if option.name == "lr_wsd_decay_style")
    assert set(flag.choices) == set(WSD_FORMULAS)
    schedule = make_schedule("wsd", wsd_style=style, wsd_length=30)
    assert {schedule.at(update) for update in range(9, 70)} == {LR}
    for update in range(70, 100):
        u = (update + 1 - 70) / 30
        assert schedule.at(update) == pytest.approx(MIN_LR + (LR - MIN_LR) * WSD_FORMULAS[style](u), rel=1e-9)
    assert schedule.at(500) == pytest.approx(MIN_LR, rel=1e-9)


def megatron_rate(consumed, lr, min_lr, warmup, decay):
    """Return the rate of Megatron's linear decay after so many samples: ``get_lr``, written once more."""
    if consumed <= warmup:
        return lr * consumed / warmup
    if consumed > decay:
        return min_lr
    return min_lr + (1 - (consumed - warmup) / (decay - warmup)) * (lr - min_lr)


@pytest.mark.parametrize("ramp", ["", "--rampup-batch-size 8 8 100"])
def test_sample_lengths_match_megatron_rates(ramp):
    line = "--train-samples 1003 --lr-warmup-samples 101 --lr-decay-samples 907 --batch-size 4 --gas 3 --min-lr 1e-4"
    config = parse([*line.split(), *ramp.split(), "--lr", "1e-2", "--lr-decay-style", "linear"], world_size=2, env={})
    schedule, batch_sizes = make_lr_scheduler(config), config.batch.batch_sizes(2)
    for step in range(config.batch.train_iters + 5):
        consumed = batch_sizes.consumed_after(step + 1)
        assert schedule.after(consumed) == pytest.approx(megatron_rate(consumed, LR, MIN_LR, 101, 907), rel=1e-12)
    assert (
        batch_sizes.consumed_after(config.batch.train_iters)
        <= 1003
        < batch_sizes.consumed_after(config.batch.train_iters + 1)
    )


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(STYLES), st.integers(1, 60), st.floats(0, 1), st.floats(0.05, 1))
def test_rate_rises_to_lr_and_then_never_increases(style, updates, warmup, fraction):
    schedule = make_schedule(style, decay_updates=updates, warmup=warmup, wsd_decay_fraction=fraction)
    values = [schedule.at(update) for update in range(updates + 3)]
    warmup_end = math.floor(schedule.warmup_updates)
    tolerance = 1e-12
    assert all(0 < value <= LR * (1 + tolerance) for value in values)
    assert all(a < b for a, b in zip(values[:warmup_end], values[1:warmup_end], strict=False))
    assert all(a >= b * (1 - tolerance) for a, b in zip(values[warmup_end:], values[warmup_end + 1 :], strict=False))
    if style in STYLES_WITH_END and style != "constant":
        assert values[-1] == pytest.approx(MIN_LR, rel=1e-9)


def test_inverse_square_root_matches_t5_after_10000_updates():
    schedule = make_schedule("inverse-square-root", lr=0.01, min_lr=0.0, decay_updates=1_000_000, warmup=0.01)
    for n in (10_000, 10_001, 40_000, 524_288, 1_000_000, 2_000_000):
        assert schedule.at(n - 1) == pytest.approx(1 / math.sqrt(max(n, 10_000)), rel=1e-14)
    assert schedule.at(4_999) == pytest.approx(0.005), "T5 has 0.01 there; we rise to it"


def test_inverse_square_root_without_warmup_stops_at_min_lr():
    schedule = make_schedule("inverse-square-root", warmup=0.0)
    assert [schedule.at(update) for update in (0, 3, 99)] == pytest.approx([LR, LR / 2, LR / 10], rel=1e-14)
    assert schedule.at(100 * 100 - 2) > MIN_LR and {schedule.at(update) for update in (100 * 100, 10**6)} == {MIN_LR}


def test_unknown_style_is_rejected_with_choices():
    with pytest.raises(ValueError, match="--lr-decay-style must be one of constant, linear, .*, got square"):
        make_schedule("square")


def test_exponential_decay_to_zero_is_rejected():
    with pytest.raises(ValueError, match="exponential needs --min-lr above 0, got 0.0"):
        make_schedule("exponential", min_lr=0.0)


@every_style
def test_every_style_is_accepted_as_flag(style):
    argv = (
        f"--lr-decay-style {style} --min-lr 1e-5 --lr 1e-3 --data-path none --device cpu --train-iters 1 --vocab-size 9"
    )
    assert parse(argv.split(), world_size=1).optimizer.lr_decay_style == style

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
from megatron.training.optimizer_setup import make_learning_rate

ENDING = [style for style in STYLES if style != INVERSE_SQUARE_ROOT]
LR, MIN, UPDATES, WARMUP = 1e-2, 1e-4, 100, 0.1
HALF_WAY = {
    "constant": LR,
    "linear": (LR + MIN) / 2,
    "cosine": (LR + MIN) / 2,
    "exponential": math.sqrt(LR * MIN),
    "wsd": LR,
    "inverse-square-root": LR * math.sqrt(10 / 55),
}
ROWS = dict(re.findall(r"^ *\| (\S+) \| (.+) \|$", LRScheduler.__doc__ or "", re.MULTILINE))
"""Style -> its formula, as the table of the class has it."""
every = pytest.mark.parametrize("style", STYLES)


def rate(style, **changes):
    return LRScheduler(
        **{"lr": LR, "min_lr": MIN, "style": style, "decay_updates": UPDATES, "warmup": WARMUP, **changes}
    )


@every
def test_warm_up_rises_in_equal_steps_to_lr(style):
    values = [rate(style).at(update) for update in range(10)]
    assert values == pytest.approx([LR * (i + 1) / 10 for i in range(10)], rel=1e-12)


@pytest.mark.parametrize("style", ENDING)
def test_the_last_update_has_min_lr_and_so_have_all_after(style):
    end = LR if style == "constant" else MIN
    for update in (UPDATES - 1, UPDATES, 10 * UPDATES):
        assert rate(style).at(update) == pytest.approx(end, rel=1e-9)
    if style != "constant":
        assert rate(style).at(UPDATES - 2) > MIN * 1.001, "not before the last"


@every
def test_without_warm_up_the_first_update_is_on_the_curve(style):
    first = rate(style, warmup=0.0).at(0)
    assert LR * 0.9 <= first <= LR


def test_every_style_is_a_choice_of_the_flag_has_a_formula_and_is_tried_half_way():
    flag = next(option for option in options_of(OptimizerConfig) if option.name == "lr_decay_style")
    assert set(flag.choices) == set(STYLES) == set(HALF_WAY) == ROWS.keys() - {"style", "---"}


@every
def test_a_style_depends_on_what_its_formula_names_and_on_nothing_else(style):
    """Beside the warm-up and the number of updates, which all have; a new parameter must stand in a formula."""
    parameters = {field.name: getattr(rate(style), field.name) for field in dataclasses.fields(LRScheduler)}
    del parameters["style"]
    of_all = {"decay_updates", "warmup", "warmup_length"}
    others = {"warmup_length": 3, "wsd_length": 40, "wsd_style": "cosine"}
    at = [*range(3 * UPDATES), 10**6]
    plain = [rate(style).at(update) for update in at]
    for name, value in parameters.items():
        changed = rate(style, **{name: others[name] if name in others else 5 * value})
        has_changed = [changed.at(update) for update in at] != plain
        is_named = name in re.findall(r"\w+", ROWS[style]) or name in of_all
        assert has_changed == is_named, name
    assert all(any(name in formula for formula in ROWS.values()) for name in parameters.keys() - of_all)


@pytest.mark.parametrize(("style", "middle"), HALF_WAY.items())
def test_half_way_through_the_decay(style, middle):
    assert rate(style).at(10 + 45 - 1) == pytest.approx(middle, rel=1e-12)


def test_cosine_is_slow_at_both_ends_and_fast_between():
    values = [rate("cosine", warmup=0.0).at(update) for update in (24, 74)]
    assert values == pytest.approx(
        [MIN + (LR - MIN) * (1 + math.cos(math.pi * u)) / 2 for u in (0.25, 0.75)], rel=1e-12
    )


def test_wsd_is_flat_until_its_last_part_and_straight_there():
    wsd = rate("wsd", warmup=0.0, wsd_decay_fraction=0.2)
    assert {wsd.at(update) for update in range(80)} == {LR}
    assert wsd.at(89) == pytest.approx((LR + MIN) / 2, rel=1e-9)


WSD = {
    "linear": lambda u: 1 - u,
    "cosine": lambda u: (1 + math.cos(math.pi * u)) / 2,
    "exponential": lambda u: 2 * 0.5**u - 1,
    "minus_sqrt": lambda u: 1 - math.sqrt(u),
}


@pytest.mark.parametrize("style", WSD)
def test_wsd_decays_as_megatrons_styles_say(style):
    flag = next(option for option in options_of(OptimizerConfig) if option.name == "lr_wsd_decay_style")
    assert set(flag.choices) == set(WSD)
    wsd = rate("wsd", wsd_style=style, wsd_length=30)
    assert {wsd.at(update) for update in range(9, 70)} == {LR}
    for update in range(70, 100):
        u = (update + 1 - 70) / 30
        assert wsd.at(update) == pytest.approx(MIN + (LR - MIN) * WSD[style](u), rel=1e-9)
    assert wsd.at(500) == pytest.approx(MIN, rel=1e-9)


def megatrons(consumed, lr, least, warmup, decay):
    """Return the rate of Megatron's linear decay after so many samples: ``get_lr``, written once more."""
    if consumed <= warmup:
        return lr * consumed / warmup
    if consumed > decay:
        return least
    return least + (1 - (consumed - warmup) / (decay - warmup)) * (lr - least)


@pytest.mark.parametrize("ramp", ["", "--rampup-batch-size 8 8 100"])
def test_lengths_in_samples_that_are_no_multiples_of_a_step_give_megatrons_rates(ramp):
    line = "--train-samples 1003 --lr-warmup-samples 101 --lr-decay-samples 907 --batch-size 4 --gas 3 --min-lr 1e-4"
    config = parse([*line.split(), *ramp.split(), "--lr", "1e-2", "--lr-decay-style", "linear"], world_size=2, env={})
    schedule, sizes = make_learning_rate(config), config.batch.sizes(2)
    for step in range(config.batch.train_iters + 5):
        consumed = sizes.consumed_after(step + 1)
        assert schedule.after(consumed) == pytest.approx(megatrons(consumed, LR, MIN, 101, 907), rel=1e-12)
    assert sizes.consumed_after(config.batch.train_iters) <= 1003 < sizes.consumed_after(config.batch.train_iters + 1)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(STYLES), st.integers(1, 60), st.floats(0, 1), st.floats(0.05, 1))
def test_it_rises_to_lr_and_never_again(style, updates, warmup, fraction):
    schedule = rate(style, decay_updates=updates, warmup=warmup, wsd_decay_fraction=fraction)
    values = [schedule.at(update) for update in range(updates + 3)]
    top = math.floor(schedule.warmup_updates)
    slack = 1e-12
    assert all(0 < value <= LR * (1 + slack) for value in values)
    assert all(a < b for a, b in zip(values[:top], values[1:top], strict=False))
    assert all(a >= b * (1 - slack) for a, b in zip(values[top:], values[top + 1 :], strict=False))
    if style in ENDING and style != "constant":
        assert values[-1] == pytest.approx(MIN, rel=1e-9)


def test_the_inverse_square_root_is_t5s_from_its_ten_thousandth_update_on():
    ours = rate("inverse-square-root", lr=0.01, min_lr=0.0, decay_updates=1_000_000, warmup=0.01)
    for n in (10_000, 10_001, 40_000, 524_288, 1_000_000, 2_000_000):
        assert ours.at(n - 1) == pytest.approx(1 / math.sqrt(max(n, 10_000)), rel=1e-14)
    assert ours.at(4_999) == pytest.approx(0.005), "T5 has 0.01 there; we rise to it"


def test_the_inverse_square_root_counts_from_the_first_update_without_a_warm_up_and_stops_at_min_lr():
    ours = rate("inverse-square-root", warmup=0.0)
    assert [ours.at(update) for update in (0, 3, 99)] == pytest.approx([LR, LR / 2, LR / 10], rel=1e-14)
    assert ours.at(100 * 100 - 2) > MIN and {ours.at(update) for update in (100 * 100, 10**6)} == {MIN}


def test_an_unknown_style_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="--lr-decay-style must be one of constant, linear, .*, got square"):
        rate("square")


def test_exponential_decay_to_zero_is_refused():
    with pytest.raises(ValueError, match="exponential needs --min-lr above 0, got 0.0"):
        rate("exponential", min_lr=0.0)


@every
def test_every_style_is_a_flag(style):
    argv = (
        f"--lr-decay-style {style} --min-lr 1e-5 --lr 1e-3 --data-path none --device cpu --train-iters 1 --vocab-size 9"
    )
    assert parse(argv.split(), world_size=1).optimizer.lr_decay_style == style

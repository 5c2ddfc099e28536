"""Lengths of the run, the warm-up and the decay in steps, samples and tokens: one is the other, or both are named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.arguments.parser import parse
from megatron.config import Config
from megatron.config.batch_rampup import BatchSizes
from megatron.errors import ConfigError

STEP = "--batch-size 2 --gas 4 --seq-length 16"
"""16 samples on two replicas, 256 tokens."""


def read(line: str, **others: object) -> Config:
    return parse(f"{STEP} {line}".split(), **{"world_size": 2, "env": {}, **others})  # type: ignore[arg-type]


def schedule(config: Config) -> tuple[object, ...]:
    found = config.optimizer
    return config.batch.train_iters, found.lr_decay_iters, found.lr_decay_samples, found.lr_warmup_samples


def test_steps_samples_and_tokens_of_one_length_are_one() -> None:
    in_samples = schedule(read("--train-samples 1600 --lr-warmup-samples 80 --lr-decay-samples 1280"))
    assert in_samples == (100, 80, 1280, 80)
    assert schedule(read("--train-samples 1600 --lr-warmup-tokens 1280 --lr-decay-tokens 20480")) == in_samples
    assert schedule(read("--train-samples 1600 --lr-warmup-iters 5 --lr-decay-iters 80")) == in_samples
    assert schedule(read("--train-tokens 25600 --lr-warmup-tokens 1280 --lr-decay-tokens 20480")) == in_samples
    steps = read("--train-iters 100 --lr-warmup-iters 5 --lr-decay-iters 80")
    assert schedule(steps) == (100, 80, None, None) and steps.optimizer.lr_warmup_iters == 5


def test_what_is_left_of_a_step_is_not_trained_on_and_a_step_within_the_tokens_is_done_whole() -> None:
    assert read("--train-samples 1_615").batch.train_iters == 100
    assert read("--train-tokens 25_601").batch.train_iters == 101
    assert read("--train-samples 1615").optimizer.lr_decay_samples == 1615, "the decay ends with the samples"


def test_a_limit_of_tokens_leaves_the_decay_as_long_as_the_steps_that_were_given() -> None:
    config = read("--train-iters 100 --train-tokens 12800 --lr-warmup-samples 16")
    assert schedule(config) == (50, 100, 1600, 16)


def test_tokens_take_the_place_of_samples_as_in_megatron_deepspeed() -> None:
    config = read("--train-samples 1600 --lr-decay-samples 1000 --lr-decay-tokens 20480")
    assert config.optimizer.lr_decay_samples == 1280
    assert config.ignored == {"--lr-decay-samples 1000": "--lr-decay-tokens overrides it"}


def test_lengths_of_a_recipe_step_back() -> None:
    recipe = {"MEGATRON_DEFAULTS": "--train-iters 7 --lr-warmup-iters 2"}
    assert read("--train-samples 1600", env=recipe).batch.train_iters == 100
    assert read("--train-samples 1600", env=recipe).optimizer.lr_warmup_samples == 32
    assert read("--train-iters 9", env={"MEGATRON_DEFAULTS": "--train-samples 1600"}).batch.train_iters == 9


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--train-samples 1600 --train-iters 99", ["got 99 steps and 1600 samples, which are 100 steps of 16"]),
        (
            "--train-samples 15",
            ["--train-samples must be enough for one step, got 15 samples and 16 in the first step"],
        ),
        (
            "--train-samples 1600 --lr-warmup-iters 5 --lr-warmup-samples 81",
            ["--lr-warmup-iters and --lr-warmup-samples must agree, got 5 steps, which are 80 samples, and 81 samples"],
        ),
        ("--train-samples 1600 --lr-warmup-samples 1600", ["must be shorter than", "--lr-warmup-samples 1600"]),
        ("--train-iters 10 --lr-warmup-iters 10", ["got --lr-warmup-iters 10 and --lr-decay-iters 10"]),
        ("--train-samples x", ["--train-samples must be an integer of at least 0", "got 'x'"]),
        ("--train-tokens -5", ["--train-tokens must be an integer of at least 0", "got -5"]),
        ("--lr-wsd-decay-iters 30 --lr-decay-style wsd --train-iters 20", ["--lr-wsd-decay-iters 30", "iters 20"]),
    ],
)
def test_lengths_that_cannot_be_name_both_numbers(line: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(line)
    assert all(part in str(caught.value) for part in parts), caught.value


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 300), st.integers(0, 2000))
def test_steps_until_is_the_first_step_that_gets_there(
    start: int, increment: int, number: int, samples: int, wanted: int
) -> None:
    sizes = BatchSizes(start + increment * number, start, increment, samples)
    steps = sizes.steps_until(wanted)
    assert sizes.consumed_after(steps) >= wanted and (steps == 0 or sizes.consumed_after(steps - 1) < wanted)
    within = sizes.steps_within(wanted)
    assert sizes.consumed_after(within) <= wanted < sizes.consumed_after(within + 1)


RAMP = "--train-samples 1600 --rampup-batch-size 4 4 48"
"""Samples after each step: 4, 8, 12, 16, 24, 32, 44, 56, and 16 more after each further one."""


@pytest.mark.parametrize(
    ("flags", "warmup", "decay", "wsd"),
    [
        ("--lr-warmup-iters 6", 32, 1600, None),
        ("--lr-warmup-iters 9 --lr-decay-iters 10", 72, 88, None),
        ("--lr-decay-iters 10 --lr-wsd-decay-iters 2", None, 88, 32),
        ("--lr-decay-iters 10 --lr-wsd-decay-iters 4", None, 88, 88 - 32),
        ("--lr-decay-samples 44 --lr-wsd-decay-iters 3", None, 44, 44 - 16),
        ("--lr-wsd-decay-iters 30", None, 1600, 480),
    ],
)
def test_steps_of_a_ramp_up_become_the_samples_of_those_steps(
    flags: str, warmup: int | None, decay: int, wsd: int | None
) -> None:
    """The warm-up has the first steps, the decay of wsd the last ones: 2 of 16 samples, or 4 of 12, 12, 16 and 16."""
    found = read(f"{RAMP} --lr-decay-style wsd --warmup 0.01 {flags}").optimizer
    assert (found.lr_warmup_samples, found.lr_decay_samples, found.lr_wsd_decay_samples) == (warmup, decay, wsd)
    assert (found.lr_warmup_iters, found.lr_wsd_decay_iters) == (None, None)


def test_a_decay_of_wsd_that_is_longer_than_the_whole_is_an_error_with_a_ramp_up_too() -> None:
    with pytest.raises(ConfigError, match="the wsd decay must be shorter than the schedule"):
        read(f"{RAMP} --lr-decay-style wsd --lr-decay-iters 6 --lr-wsd-decay-iters 7")


def test_tokens_as_the_only_length_give_the_decay() -> None:
    config = read("--train-tokens 25_601 --warmup 0.1")
    assert config.optimizer.lr_decay_samples == 25_601 / 16 and config.optimizer.warmup_length == pytest.approx(
        2560.1 / 16
    )
    assert read("--train-tokens 25_601 --lr-decay-iters 7").optimizer.lr_decay_samples is None, "in steps"
    assert read("--train-tokens 25_601 --train-iters 200").optimizer.lr_decay_samples is None
    before = read("--train-tokens 25_601 --train-tokens-lr-unit steps").optimizer
    assert (before.lr_decay_samples, before.lr_decay_iters) == (None, 101)


def test_a_warm_up_that_is_whole_but_for_rounding_is_whole() -> None:
    assert read("--train-iters 100 --warmup 0.07").optimizer.warmup_length == 7
    assert read("--train-iters 100 --warmup 0.29").optimizer.warmup_length == 29
    assert read("--train-iters 100 --warmup 0.29 --lr-warmup-rounding down").optimizer.warmup_length == 28
    assert read("--train-iters 320 --warmup 0.01").optimizer.warmup_length == 3.2

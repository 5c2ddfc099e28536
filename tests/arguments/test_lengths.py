"""Lengths of the run, the warm-up and the decay in steps, samples and tokens: one is the other, or both are named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.arguments.parser import parse
from megatron.config import Config
from megatron.config.batch_rampup import BatchSizes
from megatron.errors import ConfigError

STEP_FLAGS = "--batch-size 2 --gas 4 --seq-length 16"
"""16 samples on two replicas, 256 tokens."""


def parse_line(line: str, **kwargs: object) -> Config:
    return parse(f"{STEP_FLAGS} {line}".split(), **{"world_size": 2, "env": {}, **kwargs})  # type: ignore[arg-type]


def schedule_lengths(config: Config) -> tuple[object, ...]:
    optimizer = config.optimizer
    return config.batch.train_iters, optimizer.lr_decay_iters, optimizer.lr_decay_samples, optimizer.lr_warmup_samples


def test_steps_samples_and_tokens_give_equal_schedule() -> None:
    in_samples = schedule_lengths(parse_line("--train-samples 1600 --lr-warmup-samples 80 --lr-decay-samples 1280"))
    assert in_samples == (100, 80, 1280, 80)
    assert (
        schedule_lengths(parse_line("--train-samples 1600 --lr-warmup-tokens 1280 --lr-decay-tokens 20480"))
        == in_samples
    )
    assert schedule_lengths(parse_line("--train-samples 1600 --lr-warmup-iters 5 --lr-decay-iters 80")) == in_samples
    assert (
        schedule_lengths(parse_line("--train-tokens 25600 --lr-warmup-tokens 1280 --lr-decay-tokens 20480"))
        == in_samples
    )
    steps = parse_line("--train-iters 100 --lr-warmup-iters 5 --lr-decay-iters 80")
    assert schedule_lengths(steps) == (100, 80, None, None) and steps.optimizer.lr_warmup_iters == 5


def test_samples_round_down_and_tokens_round_up_to_steps() -> None:
    assert parse_line("--train-samples 1_615").batch.train_iters == 100
    assert parse_line("--train-tokens 25_601").batch.train_iters == 101
    assert parse_line("--train-samples 1615").optimizer.lr_decay_samples == 1615, "the decay ends with the samples"


def test_train_tokens_limit_preserves_lr_decay_steps() -> None:
    config = parse_line("--train-iters 100 --train-tokens 12800 --lr-warmup-samples 16")
    assert schedule_lengths(config) == (50, 100, 1600, 16)


def test_decay_tokens_override_decay_samples() -> None:
    config = parse_line("--train-samples 1600 --lr-decay-samples 1000 --lr-decay-tokens 20480")
    assert config.optimizer.lr_decay_samples == 1280
    assert config.ignored == {"--lr-decay-samples 1000": "--lr-decay-tokens overrides it"}


def test_command_line_length_overrides_recipe_lengths() -> None:
    recipe = {"MEGATRON_DEFAULTS": "--train-iters 7 --lr-warmup-iters 2"}
    assert parse_line("--train-samples 1600", env=recipe).batch.train_iters == 100
    assert parse_line("--train-samples 1600", env=recipe).optimizer.lr_warmup_samples == 32
    assert parse_line("--train-iters 9", env={"MEGATRON_DEFAULTS": "--train-samples 1600"}).batch.train_iters == 9


@pytest.mark.parametrize(
    ("line", "fragments"),
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
def test_inconsistent_length_error_names_both_values(line: str, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as exc_info:
        parse_line(line)
    assert all(fragment in str(exc_info.value) for fragment in fragments), exc_info.value


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 300), st.integers(0, 2000))
def test_steps_until_is_first_step_reaching_samples(
    start: int, increment: int, num_increments: int, samples: int, target: int
) -> None:
    batch_sizes = BatchSizes.ramp(start + increment * num_increments, start, increment, samples)
    steps = batch_sizes.steps_until(target)
    assert batch_sizes.consumed_after(steps) >= target and (
        steps == 0 or batch_sizes.consumed_after(steps - 1) < target
    )
    num_full_steps = batch_sizes.steps_within(target)
    assert batch_sizes.consumed_after(num_full_steps) <= target < batch_sizes.consumed_after(num_full_steps + 1)


RAMPUP_FLAGS = "--train-samples 1600 --rampup-batch-size 4 4 48"
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
def test_rampup_steps_convert_to_samples(flags: str, warmup: int | None, decay: int, wsd: int | None) -> None:
    """The warm-up has the first steps, the decay of wsd the last ones: 2 of 16 samples, or 4 of 12, 12, 16 and 16."""
    optimizer = parse_line(f"{RAMPUP_FLAGS} --lr-decay-style wsd --warmup 0.01 {flags}").optimizer
    assert (optimizer.lr_warmup_samples, optimizer.lr_decay_samples, optimizer.lr_wsd_decay_samples) == (
        warmup,
        decay,
        wsd,
    )
    assert (optimizer.lr_warmup_iters, optimizer.lr_wsd_decay_iters) == (None, None)


def test_wsd_decay_longer_than_schedule_raises() -> None:
    with pytest.raises(ConfigError, match="the wsd decay must be shorter than the schedule"):
        parse_line(f"{RAMPUP_FLAGS} --lr-decay-style wsd --lr-decay-iters 6 --lr-wsd-decay-iters 7")


def test_train_tokens_derive_lr_decay() -> None:
    config = parse_line("--train-tokens 25_601 --warmup 0.1")
    assert config.optimizer.lr_decay_samples == 25_601 / 16 and config.optimizer.warmup_length == pytest.approx(
        2560.1 / 16
    )
    assert parse_line("--train-tokens 25_601 --lr-decay-iters 7").optimizer.lr_decay_samples is None, "in steps"
    assert parse_line("--train-tokens 25_601 --train-iters 200").optimizer.lr_decay_samples is None
    in_steps = parse_line("--train-tokens 25_601 --train-tokens-lr-unit steps").optimizer
    assert (in_steps.lr_decay_samples, in_steps.lr_decay_iters) == (None, 101)


def test_warmup_fraction_ignores_float_rounding() -> None:
    assert parse_line("--train-iters 100 --warmup 0.07").optimizer.warmup_length == 7
    assert parse_line("--train-iters 100 --warmup 0.29").optimizer.warmup_length == 29
    assert parse_line("--train-iters 100 --warmup 0.29 --lr-warmup-rounding down").optimizer.warmup_length == 28
    assert parse_line("--train-iters 320 --warmup 0.01").optimizer.warmup_length == 3.2


def test_schedule_of_batch_sizes_sets_global_batch_and_run_length() -> None:
    """The last step may exceed --train-samples, as in Megatron-LM; the schedule's last size is the global batch."""
    schedule = "--step-batch-size-schedule 0:4 64:8 160:16"  # 4, 8, 16, 24, 40, 56 and 72 samples after a step
    config = parse("--seq-length 8 --batch-size 2 --train-samples 60".split() + schedule.split(), world_size=2, env={})
    assert (config.batch.gas, config.batch.global_batch_size(2), config.batch.train_iters) == (4, 16, 7)
    assert config.run_length(2).steps_left(0, 0) == 7 and config.batch.batch_sizes(2).consumed_after(7) == 72

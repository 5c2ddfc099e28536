"""Flags that Megatron's scripts pass by habit and that have no effect next to the other flags."""

from __future__ import annotations

import pytest

from megatron.arguments import parse
from megatron.arguments.other_programs import GPT
from megatron.config import Config
from megatron.errors import ConfigError

EXPERTS = "--num-experts 4 --moe-router-score-function sigmoid"


def read(line: str, **settings) -> Config:
    return parse(line.split(), world_size=1, env={}, **settings)


@pytest.mark.parametrize(
    ("line", "ignored"),
    [
        (f"{EXPERTS} --moe-router-pre-softmax", "--moe-router-pre-softmax"),
        ("--position-embedding-type rope --rotary-scaling-factor 40", "--rotary-scaling-factor 40"),
        ("--no-load-optim", "--no-load-optim"),
        ("--no-load-rng", "--no-load-rng"),
        ("--bf16 --initial-loss-scale 1000", "--initial-loss-scale 1000.0"),
        ("--error-injection-rate 5", "--error-injection-rate"),
        ("--disable-bf16-reduced-precision-matmul", "--disable-bf16-reduced-precision-matmul"),
        ("--main-grads-dtype bf16", "--main-grads-dtype"),
    ],
)
def test_a_flag_without_effect_is_listed_and_changes_nothing(line: str, ignored: str) -> None:
    config = read(line)
    assert list(config.ignored) == [ignored]
    without = read(line.replace(f" {ignored.split()[0]}", " ").partition("  ")[0] if " --" in line else "")
    assert config.namespace() == without.namespace()
    with pytest.raises(ConfigError, match="is rejected by --strict-flags"):
        read(f"{line} --strict-flags")


@pytest.mark.parametrize("line", ["--fp16 --initial-loss-scale 1000", "--initial-loss-scale 1000"])
def test_a_loss_scale_of_fp16_must_be_a_power_of_two(line: str) -> None:
    with pytest.raises(ConfigError, match="^--initial-loss-scale must be a power of 2, got 1000"):
        read(line)


def test_an_interval_of_zero_disables_the_exit_and_the_lines_between_first_and_last_step() -> None:
    config = read("--exit-interval 0 --log-interval 0")
    assert (config.run.exit_interval, config.run.log_interval) == (0, 0)


def test_megatrons_program_reports_the_scope_of_the_load_balancing_loss() -> None:
    line = "--num-experts 4 --moe-aux-loss-coeff 0.01 --hidden-dropout 0"
    note = "the load-balancing loss of the experts is computed over the global batch"
    assert [text for text in read(line, defaults=GPT).notes if note in text]
    assert not [text for text in read(line).notes if note in text]

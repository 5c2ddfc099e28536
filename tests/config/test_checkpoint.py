"""Flags of saving and loading that need or undo each other."""

from __future__ import annotations

import pytest

from megatron.config import parse
from megatron.errors import ConfigError

BASE_FLAGS = "--data-path none --vocab-size 8 --num-layers 1"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--keep-every 5", "--keep-every 5 has no effect without --keep-last K"),
        ("--load-if-exists", "--load-if-exists needs a checkpoint"),
        ("--strict-load", "--strict-load needs a checkpoint"),
        ("--load-weights-only", "--load-weights-only needs a checkpoint"),
        ("--allow-vocab-change", "--allow-vocab-change needs a checkpoint"),
        ("--load x --load-weights-only --finetune", "Remove --finetune"),
        ("--load x --load-weights-only --no-load-rng", "Remove --no-load-rng"),
        ("--load x --eval-only --load-if-exists", "--eval-only requires a checkpoint"),
        (
            "--load x --eval-only --save-interval-minutes 5 --async-save",
            "--save-interval-minutes, --async-save applies to training only",
        ),
        ("--save-interval-minutes -1", "--save-interval-minutes must be"),
        ("--on-save-error ignore", "one of continue, stop"),
    ],
)
def test_invalid_flag_combinations_raise(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse([*BASE_FLAGS.split(), *flags.split()], world_size=1)


@pytest.mark.parametrize(
    ("flags", "minutes", "is_default"),
    [
        ("", 30.0, True),
        ("--save-interval 5", 0.0, False),
        ("--save-interval-minutes 0", 0.0, False),
        ("--save-interval-minutes 0.5", 0.5, False),
        ("--save-interval 5 --save-interval-minutes 7", 7.0, False),
    ],
)
def test_default_save_interval_is_by_time(flags: str, minutes: float, is_default: bool) -> None:
    checkpoint = parse([*BASE_FLAGS.split(), *flags.split()], world_size=1).checkpoint
    assert (checkpoint.minutes, checkpoint.is_default_interval) == (minutes, is_default)

"""Flags of the debugger: what they read, and what is refused."""

from __future__ import annotations

import pytest

from megatron.config import DebugConfig, parse
from megatron.errors import ConfigError

BASE_FLAGS = "--data-path none --num-layers 2 --hidden-size 32 --num-attention-heads 4 --dry-run"


@pytest.mark.parametrize(
    "text, steps", [("1-3", [1, 2, 3]), ("4", [4]), ("1-3,10", [1, 2, 3, 10]), (" 2 , 5 - 6", [2, 5, 6])]
)
def test_debug_dump_steps_accept_numbers_and_ranges(text: str, steps: list[int]) -> None:
    assert [step for step_range in DebugConfig(debug_dump_steps=text).steps() for step in step_range] == steps


def test_debugger_is_off_by_default() -> None:
    debug = parse(BASE_FLAGS.split(), world_size=1).debug
    assert not debug.is_enabled and debug.name_pattern().search("layers.0")
    assert parse(f"{BASE_FLAGS} --debug-nan".split(), world_size=1).debug.is_enabled
    assert parse(f"{BASE_FLAGS} --debug-dump x".split(), world_size=1).debug.is_enabled
    assert parse(
        f"{BASE_FLAGS} --debug-dump x --debug-dump-steps 9,5 --train-iters 5".split(), world_size=1
    ).debug.is_enabled


@pytest.mark.parametrize(
    "extra, message",
    [
        ("--debug-dump x --debug-dump-steps 0-2", "--debug-dump-steps must be steps or ranges .* got '0-2'"),
        ("--debug-dump x --debug-dump-steps 3-1", "--debug-dump-steps must be steps or ranges"),
        ("--debug-dump x --debug-dump-steps 1,,2", "--debug-dump-steps must be steps or ranges"),
        ("--debug-dump x --debug-dump-steps all", "--debug-dump-steps must be steps or ranges"),
        ("--debug-dump x --debug-dump-modules (", r"--debug-dump-modules must be a regular expression, got '\('"),
        ("--debug-dump x --debug-dump-steps 9,6-7 --train-iters 5", "must name a step .* 9,6-7 and --train-iters 5"),
        ("--debug-dump x --train-iters 0", "must name a step of the run, got 1-3 and --train-iters 0"),
        ("--debug-dump-steps 1", "--debug-dump-steps has no effect without --debug-dump"),
        ("--debug-dump-modules a", "--debug-dump-modules has no effect without --debug-dump"),
        ("--debug-dump-tensors", "--debug-dump-tensors has no effect without --debug-dump"),
        ("--debug-nan --stability-guard skip", "--debug-nan ends the run .* --stability-guard skip continues"),
        ("--debug-nan --eval-only --load x", "--debug-nan applies to training only, got --eval-only"),
        ("--debug-dump x --eval-only --load x", "--debug-dump applies to training only, got --eval-only"),
        ("--debug-dump x --compile", "--debug-dump inspects the modules within layers.* got --compile"),
        ("--debug-nan --compile", "--debug-nan inspects the modules within layers"),
    ],
)  # fmt: skip
def test_invalid_or_ineffective_flags_raise(extra: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(f"{BASE_FLAGS} {extra}".split(), world_size=1)

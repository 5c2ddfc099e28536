"""Which runs check their layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron.config import Config, parse
from megatron.training.programs import decoder
from megatron.training.proof.policy import VARIABLE, check_policy


def make_config(flags: str = "") -> Config:
    return parse(f"--data-path none --eval-iters 0 {flags}".split(), world_size=2, env={})


def own_model() -> None: ...


@pytest.mark.parametrize(
    ("flags", "device_type", "world_size", "model_provider", "is_checked", "is_reported"),
    [
        ("", "cpu", 2, decoder.model_provider, True, False),
        ("", "cuda", 2, decoder.model_provider, False, False),
        ("--prove", "cuda", 2, decoder.model_provider, True, False),
        ("--no-prove", "cpu", 2, decoder.model_provider, False, False),
        ("", "cpu", 1, decoder.model_provider, False, False),
        ("--prove", "cpu", 1, decoder.model_provider, False, True),
        ("", "cpu", 2, own_model, False, True),
        ("--prove", "cpu", 2, own_model, True, False),
        ("--prove", "npu", 2, decoder.model_provider, False, True),
        ("--prove-only", "npu", 2, decoder.model_provider, True, False),
    ],
)
def test_default_and_flags(
    flags: str, device_type: str, world_size: int, model_provider: Callable[[], None], is_checked: bool,
    is_reported: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv(VARIABLE)
    policy = check_policy(make_config(flags), device_type, world_size, model_provider)
    assert (policy.is_checked, policy.is_reported) == (is_checked, is_reported)
    assert policy.waits == (is_checked and "--prove" in flags)


def test_variable_turns_off_the_default_but_not_the_flag() -> None:
    assert not check_policy(make_config(), "cpu", 2, decoder.model_provider).is_checked  # set by tests/conftest.py
    assert check_policy(make_config("--prove"), "cpu", 2, decoder.model_provider).is_checked

"""Flags of parallel residuals, LongRoPE, attention temperatures and xIELU: values and errors."""

from __future__ import annotations

import pytest

from megatron.config import parse
from megatron.config.decoder import parse_factors
from megatron.errors import ConfigError

ROPE = "--position-embedding-type rope --num-attention-heads 4 --hidden-size 24"
LONGROPE = f"{ROPE} --rotary-scaling longrope"


def error_message(words: str, family: str = "gpt2") -> str:
    with pytest.raises(ConfigError) as excinfo:
        parse([*words.split(), "--data-path", "none"], world_size=1, family=family)
    return str(excinfo.value)


def test_lists_of_factors_are_parsed() -> None:
    assert parse_factors("") == parse_factors("[]") == ()
    assert parse_factors("[1.0, 2,3e0]") == parse_factors("1,2,3") == (1.0, 2.0, 3.0)
    for text in ("[1,x]", "[0.0]", "[-1]", "[inf]", "[nan]"):
        with pytest.raises(ValueError):
            parse_factors(text)


def test_logit_scale_multiplies_factor_of_width() -> None:
    words = f"{ROPE} --logit-scale 0.5 --dim-model-base 6 --data-path none"
    model = parse(words.split(), world_size=1).model
    assert (model.width_logit_multiplier, model.logit_multiplier) == (0.25, 0.125)


def test_invalid_factors_are_rejected_together() -> None:
    message = error_message(f"{LONGROPE} --rotary-short-factors [1,0,2] --rotary-long-factors [1,2]")
    assert "--rotary-short-factors must be a list of positive numbers such as [1.0,1.2,2.5], got '[1,0,2]'" in message
    assert "--rotary-long-factors needs one factor for each of the 3 rotated pairs of a head, got 2" in message
    assert "--rotary-short-factors needs one factor for each of the 3 rotated pairs" in error_message(LONGROPE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            f"{ROPE} --rotary-long-factors [1,2,3]",
            "--rotary-long-factors has no effect without --rotary-scaling longrope, got none",
        ),
        (
            f"{ROPE} --parallel-residual shared-norm --norm-placement after",
            "--parallel-residual shared-norm needs a norm before attention and feed-forward layer, got "
            "--norm-placement after",
        ),
        (
            f"{ROPE} --parallel-residual separate-norms --apply-residual-connection-post-layernorm",
            "--apply-residual-connection-post-layernorm cannot be combined with --parallel-residual separate-norms",
        ),
        (
            "--attention-temperature-scale 0.1",
            "--attention-temperature-scale 0.1 needs --position-embedding-type rope, got learned_absolute",
        ),
        (
            f"{ROPE} --attention-temperature-floor 4",
            "--attention-temperature-floor has no effect without --attention-temperature-scale",
        ),
        (f"{ROPE} --logit-scale 0", "--logit-scale must be a finite number of more than 0"),
        (
            f"{ROPE} --activation xielu --num-experts 4",
            "--activation xielu has learned parameters and is not supported",
        ),
    ],
)
def test_invalid_or_ineffective_flags_raise(words: str, message: str) -> None:
    assert message in error_message(words)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_other_families_reject_xielu(family: str) -> None:
    assert "--activation xielu is supported in decoders only" in error_message("--activation xielu", family)

"""Flags of QK-clip: values, combinations and families."""

from __future__ import annotations

import pytest

from megatron.config import Config, parse
from megatron.errors import ConfigError

FLAGS = (
    "--data-path none --device cpu --vocab-size 50 --num-layers 4 --hidden-size 32 --num-attention-heads 4 "
    "--seq-length 8 --max-position-embeddings 8"
)


def parse_line(words: str) -> Config:
    return parse([*FLAGS.split(), *words.split()], world_size=1, env={})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--qk-clip --qk-norm head", "--qk-clip has no effect with --qk-norm head, which undoes any scaling"),
        ("--qk-clip --qk-l2-norm", "--qk-clip has no effect with --qk-norm l2"),
        ("--qk-clip --clip-qkv 8", "--qk-clip does not support --clip-qkv 8: scaled weights do not scale clamped"),
        (
            "--qk-clip --hybrid-layer-pattern M-M- --mamba-num-groups 1",
            "--qk-clip needs softmax attention, which no layer has",
        ),
        (
            "--log-max-attention-logit --hybrid-layer-pattern M-M- --mamba-num-groups 1",
            "--log-max-attention-logit needs softmax attention",
        ),
        ("--qk-clip --qk-clip-threshold 0", "--qk-clip-threshold must be a finite number of more than 0"),
        ("--qk-clip --qk-clip-alpha 1", "--qk-clip-alpha must be a finite number of more than 0 and less than 1"),
        ("--log-max-attention-logit --eval-only", "--log-max-attention-logit"),
    ],
)
def test_unsupported_setting_is_an_error(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_line(words)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "words",
    [
        "--log-max-attention-logit --qk-norm head --clip-qkv 8",
        "--qk-clip --multi-latent-attention --position-embedding-type rope --qk-layernorm",  # norms of latents
        "--qk-clip --hybrid-layer-pattern M*-- --mamba-num-groups 1",
    ],
)
def test_logits_that_can_be_measured_or_clipped_are_accepted(words: str) -> None:
    assert parse_line(words).model.measures_logits


@pytest.mark.parametrize("family", ["t5", "bert"])
@pytest.mark.parametrize("flag", ["--qk-clip", "--log-max-attention-logit"])
def test_other_families_reject_the_flags(family: str, flag: str) -> None:
    with pytest.raises(ConfigError, match="attention logits are measured in decoders only"):
        parse([flag], world_size=1, env={}, family=family)


def test_weights_of_a_run_do_not_depend_on_the_flags() -> None:
    plain, clipped = (parse_line(words).with_vocab(50).identity() for words in ("", "--qk-clip --qk-clip-bound"))
    assert plain == clipped

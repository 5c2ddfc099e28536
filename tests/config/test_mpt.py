"""MPT's flags, what it takes by default, and what it refuses."""

from __future__ import annotations

import pytest

from megatron.config import Config, parse
from megatron.errors import ConfigError

BASE_WORDS = ["--data-path", "none", "--seq-length", "64", "--vocab-size", "101", "--device", "cpu"]


def parse_words(*words: str, family: str = "mpt") -> Config:
    return parse([*BASE_WORDS, *words], world_size=1, env={}, family=family)


def test_mpt_defaults_are_no_dropout_gelu_tied_alibi() -> None:
    config = parse_words()
    model = config.model
    assert (model.position_embedding_type, model.alibi_bias_max, model.clip_qkv) == ("alibi", 8, 0.0)
    assert (model.normalization, model.norm_bias) == ("LayerNorm", False)
    assert (model.attention_dropout, model.hidden_dropout, model.activation) == (0.0, 0.0, "gelu")
    assert not model.untie_embeddings and not model.hidden_bias and model.max_position_embeddings == 64


def test_alibi_and_clipping_are_in_model_section_and_identity() -> None:
    config = parse_words("--alibi-bias-max", "16", "--clip-qkv", "6")
    assert (config.model.alibi_bias_max, config.model.clip_qkv) == (16, 6.0)
    identity = config.identity()
    assert (identity["family"], identity["alibi_bias_max"], identity["clip_qkv"]) == ("mpt", 16, 6.0)
    assert "max_position_embeddings" not in identity


def test_seq_length_may_exceed_max_positions_with_alibi() -> None:
    assert parse_words("--max-position-embeddings", "32").batch.seq_length == 64
    assert parse_words("--max-position-embeddings", "32").model.max_position_embeddings == 32


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--alibi-bias-max", "0"], "--alibi-bias-max must be a positive integer, got 0"),
        (["--clip-qkv", "-1"], "--clip-qkv must be a finite number of at least 0, got -1.0"),
        (["--reset-position-ids"], "alibi, which has no position ids: --reset-attention-mask is enough"),
        (["--rotary-base", "500000"], "--rotary-base has no effect without --position-embedding-type rope, got alibi"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_invalid_or_ineffective_flags_raise(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as exc_info:
        parse_words(*words)
    assert message in str(exc_info.value)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_alibi_bias_max_without_alibi_raises(family: str) -> None:
    with pytest.raises(ConfigError, match="--alibi-bias-max has no effect without --position-embedding-type alibi"):
        parse_words("--alibi-bias-max", "4", family=family)

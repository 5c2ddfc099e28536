"""MPT's flags, what it takes by default, and what it refuses."""

from __future__ import annotations

import pytest

from megatron.config import Config, parse
from megatron.errors import ConfigError

WORDS = ["--data-path", "none", "--seq-length", "64", "--vocab-size", "101", "--device", "cpu"]


def parsed(*words: str, family: str = "mpt") -> Config:
    return parse([*WORDS, *words], world_size=1, env={}, family=family)


def test_mpt_drops_nothing_has_exact_gelu_a_tied_head_and_slopes_to_an_eighth_power() -> None:
    config = parsed()
    model = config.model
    assert (model.position_embedding_type, model.alibi_bias_max, model.clip_qkv) == ("alibi", 8, 0.0)
    assert (model.normalization, model.norm_bias) == ("LayerNorm", False)
    assert (model.attention_dropout, model.hidden_dropout, model.activation) == (0.0, 0.0, "gelu")
    assert not model.untie_embeddings and not model.hidden_bias and model.max_position_embeddings == 64


def test_its_slopes_and_clipping_reach_the_models_section_and_its_identity() -> None:
    config = parsed("--alibi-bias-max", "16", "--clip-qkv", "6")
    assert (config.model.alibi_bias_max, config.model.clip_qkv) == (16, 6.0)
    identity = config.identity()
    assert (identity["family"], identity["alibi_bias_max"], identity["clip_qkv"]) == ("mpt", 16, 6.0)
    assert "max_position_embeddings" not in identity


def test_a_sequence_may_be_longer_than_the_length_it_was_made_for() -> None:
    assert parsed("--max-position-embeddings", "32").batch.seq_length == 64
    assert parsed("--max-position-embeddings", "32").model.max_position_embeddings == 32


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
def test_what_cannot_act_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parsed(*words)
    assert message in str(error.value)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_slopes_need_alibi(family: str) -> None:
    with pytest.raises(ConfigError, match="--alibi-bias-max has no effect without --position-embedding-type alibi"):
        parsed("--alibi-bias-max", "4", family=family)

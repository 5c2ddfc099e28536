"""MPT's flags, what it takes by default, and what it refuses."""

from __future__ import annotations

import pytest

from megatron.arguments import config_from_values
from megatron.arguments.validate import find_problems
from megatron.config import Config, parse
from megatron.errors import ConfigError

WORDS = ["--data-path", "none", "--seq-length", "64", "--vocab-size", "101", "--device", "cpu"]


def parsed(*words: str, family: str = "mpt") -> Config:
    return parse([*WORDS, *words], world_size=1, env={}, family=family)


def test_mpt_drops_nothing_has_exact_gelu_a_tied_head_and_slopes_to_an_eighth_power() -> None:
    config = parsed()
    assert (config.own.alibi_bias_max, config.own.clip_qkv) == (8, 0.0)
    model = config.model
    assert (model.attention_dropout, model.hidden_dropout, model.activation) == (0.0, 0.0, "gelu")
    assert not model.untie_embeddings and not model.hidden_bias and model.max_position_embeddings == 64


def test_flags_of_its_own_reach_its_section_and_its_identity() -> None:
    config = parsed("--alibi-bias-max", "16", "--clip-qkv", "6")
    assert (config.own.alibi_bias_max, config.own.clip_qkv) == (16, 6.0)
    identity = config.identity()
    assert (identity["family"], identity["alibi_bias_max"], identity["clip_qkv"]) == ("mpt", 16, 6.0)
    assert "max_position_embeddings" not in identity


def test_a_sequence_may_be_longer_than_the_length_it_was_made_for() -> None:
    assert parsed("--max-position-embeddings", "32").batch.seq_length == 64
    assert parsed("--max-position-embeddings", "32").model.max_position_embeddings == 32


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hidden-bias"], "--hidden-bias is refused: MPT has no biases"),
        (["--alibi-bias-max", "0"], "--alibi-bias-max must be a positive integer, got 0"),
        (["--clip-qkv", "-1"], "--clip-qkv must be a finite number of at least 0, got -1.0"),
        (["--reset-position-ids"], "MPT has no positions; --reset-attention-mask alone keeps documents apart"),
        (["--apply-residual-connection-post-layernorm"], "MPT adds to the input of a layer's parts"),
        (["--num-query-groups", "2"], "--num-query-groups is refused"),
        (["--rotary-base", "500000"], "--rotary-base is refused"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_act_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parsed(*words)
    assert message in str(error.value)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("words", [["--alibi-bias-max", "4"], ["--clip-qkv", "6"]], ids=lambda words: words[0])
def test_its_flags_are_refused_elsewhere(family: str, words: list[str]) -> None:
    with pytest.raises(ConfigError, match="examples/mpt/pretrain_mpt.py"):
        parsed(*words, family=family)


def test_a_script_that_gives_it_biases_is_told() -> None:
    config = config_from_values({"hidden_bias": True, "vocab_size": 101}, family="mpt")
    assert any("whose layers and norms have no biases" in problem for problem in find_problems(config, 1))

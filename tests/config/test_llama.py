"""LLaMA's flags, what it takes by default, and what it refuses."""

from __future__ import annotations

import pytest

from megatron.arguments import config_from_values
from megatron.arguments.help import help_text
from megatron.config import Config, parse
from megatron.errors import ConfigError
from megatron.models.registry import FAMILIES

BASE_WORDS = ["--data-path", "none", "--seq-length", "64", "--vocab-size", "101", "--device", "cpu"]
UNTIED, TIED = "--untie-embeddings-and-output-weights", "--tie-embeddings-and-output-weights"


def parse_words(*words: str, family: str = "llama", world_size: int = 1, defaults: str = "") -> Config:
    return parse([*BASE_WORDS, *words], world_size=world_size, env={"MEGATRON_DEFAULTS": defaults}, family=family)


def test_llama_defaults_are_no_dropout_gated_silu_untied() -> None:
    config = parse_words("--num-attention-heads", "8")
    model = config.model
    assert (model.attention_dropout, model.hidden_dropout, model.activation) == (0.0, 0.0, "gated-silu")
    assert model.untie_embeddings and not model.hidden_bias and model.max_position_embeddings == 64
    assert (model.num_query_groups, model.rotary_base, model.rotary_scaling) == (8, 10000.0, "none")
    assert (model.position_embedding_type, model.normalization) == ("rope", "RMSNorm")
    assert config_from_values({}, family="llama").model.untie_embeddings
    for text, is_default in ((help_text(family="llama", show_all=True), True), (help_text(show_all=True), False)):
        assert ("default:gated-silu" in "".join(text.split())) == is_default  # lines may break after a hyphen


def test_recipe_overrides_family_defaults_and_flags_override_recipe() -> None:
    assert not parse_words(defaults=TIED).model.untie_embeddings
    assert parse_words(UNTIED, defaults=TIED).model.untie_embeddings
    assert not parse_words(TIED).model.untie_embeddings and not parse_words(TIED, family="gpt2").model.untie_embeddings
    assert not parse_words(TIED, family="gpt2", defaults=UNTIED).model.untie_embeddings
    assert parse_words("--hidden-dropout", "0.1").model.hidden_dropout == 0.1


def test_query_groups_and_rope_are_in_model_section_and_identity() -> None:
    config = parse_words("--num-key-value-heads", "2", "--rope-theta", "500000", "--rotary-scaling", "llama3")
    identity = config.identity()
    assert (identity["family"], identity["num_query_groups"], identity["rotary_base"]) == ("llama", 2, 500000.0)
    assert identity["rotary_scaling"] == "llama3" and "max_position_embeddings" not in identity
    assert config.to_dict()["model"]["num_query_groups"] == 2
    assert not {"llama", "t5", "mpt", "bert"} & set(config.to_dict())
    assert config.namespace().num_key_value_heads == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-query-groups 3", "--num-attention-heads must be a multiple of --num-query-groups, got 4 and 3"),
        (
            "--num-query-groups 2 --model-parallel-size 4",
            "--num-query-groups must be a multiple of --model-parallel-size",
        ),
        ("--num-query-groups 0", "--num-query-groups must be a positive integer, got 0"),
        ("--kv-hidden-size 5", "must be even for rotary positions, which rotate pairs of elements, got 5"),
        (
            "--rotary-low-frequency-factor 2",
            "--rotary-low-frequency-factor has no effect without --rotary-scaling llama3",
        ),
        (
            "--rotary-scaling linear --rotary-original-positions 64",
            "--rotary-original-positions has no effect without --rotary-scaling llama3 or yarn or longrope, got linear",
        ),
        (
            "--rotary-scaling llama3 --rotary-low-frequency-factor 4",
            "--rotary-high-frequency-factor must exceed --rotary-low-frequency-factor, got 4 and 4",
        ),
        ("--rotary-base 1", "--rotary-base must be a finite number of more than 1, got 1.0"),
        ("--max-position-embeddings 32", "--seq-length must not exceed --max-position-embeddings, got 64 and 32"),
        ("--position-embedding-type relative", "must be one of learned_absolute, rope, alibi, none in a decoder"),
        (
            "--position-embedding-type learned --rotary-base 500",
            "--rotary-base has no effect without --position-embedding-type rope",
        ),
    ],
)
def test_invalid_or_ineffective_flags_raise(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as exc_info:
        parse_words(*words.split(), world_size=4)
    assert message in str(exc_info.value)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.model_type != "decoder"])
def test_decoder_flags_raise_in_other_families(family: str) -> None:
    for flag, value in (("--num-query-groups", "2"), ("--rotary-base", "500"), ("--clip-qkv", "6")):
        with pytest.raises(ConfigError, match="it is supported in decoders only; remove it"):
            parse([flag, value], world_size=1, env={}, family=family)

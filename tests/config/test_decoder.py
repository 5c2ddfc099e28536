"""The features of a decoder as flags: what they mean, what cannot go together, windows by layer."""

from __future__ import annotations

import pytest

from megatron.config import Config, parse
from megatron.config.decoder import has_window, window_pattern
from megatron.errors import ConfigError

BASE_FLAGS = "--data-path none --seq-length 64 --vocab-size 101 --device cpu"


def parse_line(words: str, family: str = "gpt2", world_size: int = 1) -> Config:
    return parse(f"{BASE_FLAGS} {words}".split(), world_size=world_size, env={}, family=family)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--window-size 48", "window_size", 48),
        ("--window-size 48,0", "window_size", 48),
        ("--window-size (48,0)", "window_size", 48),
        ("--window-size -1,0", "window_size", 0),
        ("--qk-layernorm", "qk_norm", "head"),
        ("--use-rotary-position-embeddings", "position_embedding_type", "rope"),
        ("--position-embedding-type learned", "position_embedding_type", "learned_absolute"),
        ("--apply-layernorm-1p", "layernorm_1p", True),
        ("--no-norm-bias", "norm_bias", False),
        ("--squared-relu", "activation", "squared-relu"),
        ("--kv-channels 24 --use-rotary-position-embeddings --rotary-percent 0.5", "rotary_percent", 0.5),
    ],
)
def test_megatron_flag_sets_field(words: str, field: str, value: object) -> None:
    for family in ("gpt2", "llama", "mpt"):
        if family == "gpt2" or "norm" not in words:
            assert getattr(parse_line(words, family).model, field) == value


@pytest.mark.parametrize(
    ("text", "num_layers", "pattern"),
    [
        ("", 3, "111"),
        ("2", 5, "10101"),
        ("6", 7, "1111101"),
        ("1", 3, "000"),
        ("[1,1,0]", 3, "110"),
        ("([1]*5+[0])*2", 12, "111110111110"),
        ("2*[1] + [0]*2", 4, "1100"),
    ],
)
def test_window_pattern_matches_megatron(text: str, num_layers: int, pattern: str) -> None:
    assert window_pattern(text, num_layers) == tuple(digit == "1" for digit in pattern)
    words = [
        "--window-size",
        "8",
        "--num-layers",
        str(num_layers),
        *(["--window-attn-skip-freq", text] if text else []),
    ]
    config = parse([*BASE_FLAGS.split(), *words], world_size=1, env={})
    assert [has_window(config.model, layer_idx) for layer_idx in range(num_layers)] == [
        digit == "1" for digit in pattern
    ]
    assert not has_window(parse_line("").model, 0)


@pytest.mark.parametrize(
    "text",
    [
        "[1,0]",
        "[1,2,0,0]",
        "0",
        "1.5",
        "[1]*4.0",
        "__import__('os')",
        "[1]*1000000000",
        "[[1]]*4",
        "[1,0,1,0",
        "x",
        "[1]**4",
    ],
)
def test_invalid_window_pattern_raises(text: str) -> None:
    words = [*BASE_FLAGS.split(), "--window-size", "8", "--window-attn-skip-freq", text]
    with pytest.raises(ConfigError, match="--window-attn-skip-freq must be a number of at least 1, or a list"):
        parse(words, world_size=1, env={})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--window-size 8,8", "--window-size must be an integer of at least 0, got '8,8'"),
        ("--window-size 1.5", "--window-size must be"),
        (
            "--window-attn-skip-freq 2",
            "--window-attn-skip-freq applies to layers with a window only, got no --window-size",
        ),
        (
            "--rotary-base 500",
            "--rotary-base has no effect without --position-embedding-type rope, got learned_absolute",
        ),
        ("--rotary-percent 0.5 --rotary-scaling yarn", "--rotary-scaling, --rotary-percent has no effect"),
        ("--alibi-bias-max 4", "--alibi-bias-max has no effect without --position-embedding-type alibi"),
        (
            "--use-rotary-position-embeddings --rotary-beta-fast 16",
            "--rotary-beta-fast has no effect without --rotary-scaling yarn, got none",
        ),
        (
            "--use-rotary-position-embeddings --rotary-scaling yarn --rotary-beta-fast 0.5",
            "--rotary-beta-fast must be at least --rotary-beta-slow, got 0.5 and 1. Raise --rotary-beta-fast",
        ),
        (
            "--use-rotary-position-embeddings --kv-hidden-size 10 --rotary-percent 0.5",
            "--kv-hidden-size times --rotary-percent must be an even number of at least 2",
        ),
        (
            "--use-rotary-position-embeddings --rotary-local-base 100",
            "--rotary-local-base applies to layers with a window",
        ),
        ("--no-norm-bias --normalization RMSNorm", "--no-norm-bias applies to layer norms only"),
        (
            "--norm-placement after --apply-residual-connection-post-layernorm",
            "--apply-residual-connection-post-layernorm needs a norm before attention",
        ),
        ("--position-embedding-type none --reset-position-ids", "--reset-position-ids has no effect with"),
        ("--num-query-groups 3", "--num-attention-heads must be a multiple of --num-query-groups, got 4 and 3"),
        ("--softmax-scale 0", "--softmax-scale must be a finite number of more than 0"),
        ("--attn-logit-softcapping -1", "--attn-logit-softcapping must be a finite number of at least 0"),
    ],
)
def test_invalid_or_ineffective_flags_raise(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as exc_info:
        parse_line(words)
    assert message in str(exc_info.value)


def test_family_defaults_do_not_conflict_with_flags() -> None:
    """MPT's norms do not shift, and RMS norms have nothing to shift: no flag said so."""
    model = parse_line("--normalization RMSNorm --position-embedding-type rope", family="mpt").model
    assert (model.normalization, model.norm_bias, model.position_embedding_type) == ("RMSNorm", False, "rope")
    assert (
        parse_line("--seq-length 64 --max-position-embeddings 32 --position-embedding-type none").batch.seq_length == 64
    )

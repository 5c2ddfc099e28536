from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron.errors import DataError
from megatron.models.t5.data import T5Tokens, t5_tokens
from megatron.models.t5.spans import parse_denoisers

SINGLE_DENOISER, SEVERAL_DENOISERS = parse_denoisers("R", 0.15, 3), parse_denoisers("S,R", 0.15, 3)


@dataclass
class FakeTokenizer:
    """What control tokens need of a tokenizer."""

    vocab_size: int = 100
    eod_id: int = 7
    pad_id: int | None = None
    sentinel_ids: tuple[int, ...] = field(default=())


def make_tokens(denoisers: Any = SINGLE_DENOISER, extra_ids: int = 10, **overrides: Any) -> T5Tokens:
    return t5_tokens(FakeTokenizer(**overrides), extra_ids, denoisers)


def test_sentinels_count_down_from_top_of_vocabulary() -> None:
    tokens = make_tokens()
    assert tokens.sentinels == tuple(range(109, 99, -1)) and tokens.modes == {}
    assert (tokens.eos_id, tokens.start_id, tokens.pad_id) == (7, 7, 7)
    assert (tokens.text_vocab_size, tokens.vocab_size) == (100, 110)
    assert tokens == T5Tokens.appended(100, 10, 7)


def test_mode_tokens_follow_sentinels() -> None:
    assert (
        make_tokens(SEVERAL_DENOISERS).modes == {"S": 110, "R": 111}
        and make_tokens(SEVERAL_DENOISERS).vocab_size == 112
    )
    assert T5Tokens.appended(100, 10, 7, 3).modes == {"R": 110, "X": 111, "S": 112}


def test_tokenizer_control_tokens_are_used() -> None:
    tokens = make_tokens(SEVERAL_DENOISERS, pad_id=0, sentinel_ids=(99, 98, 97))
    assert (tokens.start_id, tokens.pad_id, tokens.eos_id) == (0, 0, 7)
    assert tokens.sentinels == (99, 98, 97) and tokens.modes == {"S": 100, "R": 101} and tokens.vocab_size == 102
    assert make_tokens(pad_id=0, sentinel_ids=(99,)).vocab_size == 100


def test_too_few_sentinels_raises_with_fix() -> None:
    make_tokens().require_sentinels(10, "--enc-seq-length 512")
    with pytest.raises(DataError, match="512 needs 11 sentinels.* provides 10. Raise --vocab-extra-ids to 11"):
        make_tokens().require_sentinels(11, "--enc-seq-length 512")
    with pytest.raises(DataError, match="provides 0. Raise --vocab-extra-ids to 1,"):
        make_tokens(extra_ids=0).require_sentinels(1, "--enc-seq-length 8")
    with pytest.raises(DataError, match="the tokenizer provides 3. Use a tokenizer with more"):
        make_tokens(sentinel_ids=(99, 98, 97)).require_sentinels(4, "--enc-seq-length 512")

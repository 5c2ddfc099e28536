"""Ids that stand for nothing."""

from __future__ import annotations

import pytest

from megatron.errors import DataError
from megatron.tokenizer import build


def test_null_tokenizer_maps_ids_to_text_and_last_id_is_eod() -> None:
    tokenizer = build("NullTokenizer", vocab_size=20)
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.sentinel_ids) == (20, 19, ())
    assert tokenizer.encode("3 1 19") == [3, 1, 19] and tokenizer.decode([3, 1, 19]) == "3 1 19"
    assert tokenizer.identity == build("NullTokenizer", vocab_size=20).identity
    assert tokenizer.identity != build("NullTokenizer", vocab_size=21).identity


def test_invalid_ids_files_and_missing_vocab_size_are_rejected() -> None:
    with pytest.raises(DataError, match="ids below 20 separated by spaces, got '20'"):
        build("NullTokenizer", vocab_size=20).encode("3 20")
    with pytest.raises(DataError, match="requires --vocab-size"):
        build("NullTokenizer")
    with pytest.raises(DataError, match="does not read files, got v.json"):
        build("NullTokenizer", vocab_file="v.json", vocab_size=20)

"""Ids that stand for nothing."""

from __future__ import annotations

import pytest

from megatron.errors import DataError
from megatron.tokenizer import build


def test_the_text_of_ids_is_the_ids_and_the_last_one_ends_a_document() -> None:
    tokenizer = build("NullTokenizer", vocab_size=20)
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.sentinel_ids) == (20, 19, ())
    assert tokenizer.encode("3 1 19") == [3, 1, 19] and tokenizer.decode([3, 1, 19]) == "3 1 19"
    assert tokenizer.identity == build("NullTokenizer", vocab_size=20).identity
    assert tokenizer.identity != build("NullTokenizer", vocab_size=21).identity


def test_what_is_no_id_is_refused_and_so_is_a_file_or_no_number_of_ids() -> None:
    with pytest.raises(DataError, match="ids below 20 separated by spaces, got '20'"):
        build("NullTokenizer", vocab_size=20).encode("3 20")
    with pytest.raises(DataError, match="needs --vocab-size"):
        build("NullTokenizer")
    with pytest.raises(DataError, match="does not read files, got v.json"):
        build("NullTokenizer", vocab_file="v.json", vocab_size=20)

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron import tokenizer
from megatron.tokenizer import known_words
from megatron.tokenizer.huggingface import LibraryTokenizer, ids_of, load
from megatron.tokenizer.known_words import KnownWords, are_independent

ALPHABET = "ab1 \n\t\r.,'s!_-  中é\u3000\u200b\xa0\x85\x1c\x1f\u2028\u180e" + " " * 8


@pytest.fixture(scope="module")
def built(bpe_path: Path) -> LibraryTokenizer:
    built = tokenizer.build(tokenizer_path=bpe_path)
    assert isinstance(built, LibraryTokenizer) and built._words is not None
    return built


def assert_ids_equal_library(built: LibraryTokenizer, words: KnownWords, texts: list[str]) -> None:
    for expected, actual in zip(ids_of(built._library, texts), words.encode_arrays(texts), strict=True):
        assert expected.dtype == actual.dtype and np.array_equal(expected, actual)


@settings(max_examples=40, deadline=None)
@example(texts=["b a b  a\n b\t a \u3000a it's a", " a", "a ", "", " "])
@given(texts=st.lists(st.one_of(st.text(ALPHABET, max_size=40), st.text(max_size=12)), max_size=8))
def test_word_cache_ids_equal_library(built: LibraryTokenizer, texts: list[str]) -> None:
    assert built._words is not None
    assert_ids_equal_library(built, built._words, texts)


@pytest.mark.parametrize("is_exhaustive", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_space_classification_equals_library_for_every_character(built: LibraryTokenizer, is_exhaustive: bool) -> None:
    """Of letters without case (ideographs, most), private and unassigned characters every 61st, of all others each."""
    caseless_categories = ("Lo", "Co", "Cn")
    codes = [
        code
        for code in range(0, 0x110000, 1 if is_exhaustive else 1499)
        if not 0xD800 <= code < 0xE000
        and (not is_exhaustive or code % 61 == 0 or unicodedata.category(chr(code)) not in caseless_categories)
    ]
    assert len(codes) > (30_000 if is_exhaustive else 700)
    characters = [chr(code) for code in codes]
    characters += [
        chr(code) for code in (*range(0x21), 0x7F, 0x85, 0xA0, 0x1680, 0x180E, *range(0x2000, 0x2070), 0x3000)
    ]
    assert built._words is not None
    for start in range(0, len(characters), 20_000):
        assert_ids_equal_library(
            built,
            built._words,
            [
                f"a {character} b{character}c {character}{character} d{character} e"
                for character in characters[start : start + 20_000]
            ],
        )


def test_word_cache_is_bounded_and_skips_texts_without_spaces(
    built: LibraryTokenizer, corpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = KnownWords(lambda texts: ids_of(built._library, texts))
    assert_ids_equal_library(built, words, [corpus[0].replace(" ", ""), "", "alone"])
    assert not words._tokens and words._num_characters == 0
    assert_ids_equal_library(built, words, corpus[-3:])
    assert len(words._tokens) > 100
    assert words._num_characters == sum(len(word) + known_words.ENTRY_CHARACTERS for word in words._tokens)
    monkeypatch.setattr(known_words, "_CACHE_CHARACTERS", 10)
    assert_ids_equal_library(built, words, corpus[-3:])
    assert not words._tokens
    assert_ids_equal_library(built, words, corpus)


def test_word_cache_requires_gpt2_pre_tokenizer(bpe_path: Path) -> None:
    fields = json.loads(bpe_path.read_text())
    assert are_independent(json.dumps(fields))
    for change in (
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {**fields["pre_tokenizer"], "add_prefix_space": True}},
        {"pre_tokenizer": {**fields["pre_tokenizer"], "use_regex": False}},
        {"pre_tokenizer": None},
        {"model": {**fields["model"], "dropout": 0.1}},
        {"added_tokens": [{**fields["added_tokens"][0], "special": False}]},
    ):
        assert not are_independent(json.dumps(fields | change))
        load(json.dumps(fields | change))  # each of them is a tokenizer

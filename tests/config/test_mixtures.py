"""Corpora and their weights as the user writes them."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.data_paths import parse_paths, parse_schedule, quote_path

PATHS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=12)


def test_parse_paths_accepts_path_or_weighted_paths() -> None:
    assert parse_paths("data/corpus") == ((1.0, "data/corpus"),)
    assert parse_paths("0.7 a 0.3 b") == ((0.7, "a"), (0.3, "b"))
    assert parse_paths("2 'my corpus' 0 7") == ((2.0, "my corpus"), (0.0, "7"))
    assert parse_paths("7") == ((1.0, "7"),), "a single word is a path, even if it looks like a number"


@settings(max_examples=40)
@given(st.lists(PATHS, min_size=1, max_size=4, unique=True))
def test_quoted_paths_round_trip(paths: list[str]) -> None:
    words = [word for path in paths for word in ("1.5", path)]
    assert parse_paths(shlex.join(words)) == tuple((1.5, path) for path in paths)
    if not paths[0].split()[:1] or not paths[0].split()[0].replace(".", "").isdigit():
        assert parse_paths(quote_path(paths[0])) == ((1.0, paths[0]),)


def test_one_word_preserves_mixture_and_quotes_spaces() -> None:
    assert quote_path("0.7 a 0.3 b") == "0.7 a 0.3 b"
    assert quote_path("data/corpus") == "data/corpus"
    assert parse_paths(quote_path("it's my corpus")) == ((1.0, "it's my corpus"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "which contains an empty path"),
        ("1 ''", "which contains an empty path"),
        ("a b c", "3 words"),
        ("a b", "the weight 'a' is not a finite number"),
        ("-1 a 2 b", "the weight '-1' is not a finite number"),
        ("inf a 2 b", "the weight 'inf' is not a finite number"),
        ("nan a 2 b", "the weight 'nan' is not a finite number"),
        ("0 a 0 b", "the weights are all 0"),
        ("1e308 a 1e308 b", "their sum is infinite"),
        ("1 a 2 a", "which contains a more than once"),
        ("1 'a", "No closing quotation"),
    ],
)
def test_invalid_paths_error_names_flag(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="--valid-data-path must be one path") as exc_info:
        parse_paths(text, "--valid-data-path")
    assert message in str(exc_info.value) and repr(text) in str(exc_info.value)


def test_parse_schedule_reads_entries() -> None:
    expected = ((1_000_000_000, (0.5, 0.5)), (2_000_000_001, (0.0, 0.8)))
    assert parse_schedule("1e9: 0.5 0.5; 2000000001: 0 0.8;", 2) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (";", "which has no entry"),
        ("1e9 0.5 0.5", "no colon"),
        ("x: 1 1", "'x' is not a positive whole number"),
        ("0: 1 1", "'0' is not a positive whole number"),
        ("1.5: 1 1", "'1.5' is not a positive whole number"),
        ("1e30: 1 1", "'1e30' is not a positive whole number"),
        ("5: 1", "has 1 weights for 2 corpora"),
        ("5: 1 a", "the weight 'a' is not a finite number"),
        ("5: 0 0", "the weights are all 0"),
        ("5: 1 1; 5: 1 2", "5 tokens follow 5"),
    ],
)
def test_invalid_schedule_raises(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="--mixture-schedule must be entries") as exc_info:
        parse_schedule(text, 2)
    assert message in str(exc_info.value)

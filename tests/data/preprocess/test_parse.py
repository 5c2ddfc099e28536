from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.preprocess import BadRecord, Record, parse

TEXTS = st.text(st.characters(codec=None), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b", "a.b"]), inner, max_size=3),
    max_leaves=6,
)


def parse_texts(data: bytes, *keys: str, max_chars: int = 0) -> list[str] | str:
    """The texts, or the reason why there are none."""
    result = parse(Record("c.jsonl", 3, 32, data), keys or None, max_chars)
    return result.reason if isinstance(result, BadRecord) else result


@pytest.mark.parametrize(
    "data, reason",
    [
        (b'{"text": "cut', "not JSON (unexpected end of data: line 1 column 14 (char 13))"),
        (b"words", "not JSON ("),
        (b'{"text": "a"} {"text": "b"}', "not JSON ("),
        (b'{"txt": "a", "x": 1}', "has no key 'text' (--json-key), only 'txt', 'x'"),
        (b"{}", "has no key 'text' (--json-key), only none"),
        (b'{"text": null}', "the value of 'text' must be a string, got null"),
        (b'{"text": 5}', "the value of 'text' must be a string, got 5"),
        (b'{"text": ["a"]}', "the value of 'text' must be a string, got a list"),
        (b'{"text": {"a": "b"}}', "the value of 'text' must be a string, got an object"),
        (
            b'["text"]',
            "must be a JSON object with the key 'text', got a list; write each element of a JSON array on",
        ),
        (b'"text"', "must be a JSON object with the key 'text', got 'text'"),
        (b'{"text": "\xff"}', "not UTF-8 text (invalid start byte at 10)"),
        (b'{"text": "\xed\xa0\x80"}', "not UTF-8 text (invalid continuation byte at 10)"),
        (b'{"text": "a\\u0000"}', "contains a NUL character"),
        (b'{"text": "\\ud800"}', "contains a lone surrogate (half of a character)"),
        (b'{"text": "a", "other": "\\udc00"}', "contains a lone surrogate"),
        (b'\xef\xbb\xbf{"text": "a', "not JSON (unexpected end of data"),
        (b'\xef\xbb{"text": "a"}', "not UTF-8 text (invalid continuation byte at 0)"),
        (b"[" * 100_000, "not JSON ("),
    ],
)
def test_bad_record_reports_reason(data: bytes, reason: str) -> None:
    assert str(parse_texts(data, "text")).startswith(reason)


def test_bad_record_reports_position_and_opening() -> None:
    bad_record = parse(Record("c.jsonl", 3, 32, b'{"text": "\x1b\xff' + b"x" * 90), ["text"])
    assert isinstance(bad_record, BadRecord)
    opening = '{"text": "\\x1b\\xff' + "x" * 48
    assert str(bad_record) == f"c.jsonl:3 (byte 32): not UTF-8 text (invalid start byte at 11): {opening}"
    assert bad_record.to_json() == {
        "file": "c.jsonl",
        "line": 3,
        "byte_offset": 32,
        "reason": "not UTF-8 text (invalid start byte at 11)",
        "opening": opening,
    }
    assert str(BadRecord("c", 0, 32, "why", "how")) == "c (byte 32): why: how"


def test_blank_records_and_empty_texts_are_not_errors() -> None:
    for data in (b"", b" \t\r", b"\r"):
        assert parse_texts(data, "text") == parse_texts(data) == []
    assert parse_texts(b'{"text": ""}', "text") == parse_texts(b'{"a": "", "b": ""}', "a", "b") == []
    assert parse_texts(b'{"text": " "}', "text") == [" "]


def test_byte_order_marks_before_json_are_stripped() -> None:
    """`cat` of files that begin with one leaves them in the middle, one after the other where files are empty."""
    bom = b"\xef\xbb\xbf"
    assert parse_texts(bom + b'{"text": "a"}', "text") == parse_texts(bom * 1000 + b'{"text": "a"}', "text") == ["a"]
    assert parse_texts(bom, "text") == parse_texts(bom * 2 + b" \r", "text") == []
    assert parse_texts(b'{"text": "' + bom + b'a"}', "text") == ["\ufeffa"], "within a text it is a character"


def test_line_endings_become_line_feeds_and_other_separators_stay() -> None:
    assert parse_texts(b'{"text": "a\\r\\nb\\rc\\u2028d"}\r', "text") == ["a\nb\rc\u2028d"]
    assert parse_texts("a\r\nb\u2028\n".encode()) == ["a\nb\u2028\n"]
    assert (
        parse_texts(b"a\xff") == "not UTF-8 text (invalid start byte at 1)"
        and parse_texts(b"a\x00") == "contains a NUL character"
    )


def test_json_keys_can_be_nested_or_multiple() -> None:
    nested = b'{"a": {"b": {"c": "deep"}, "b.c": "dotted"}, "a.b": "whole", "t": "title", "e": ""}'
    assert parse_texts(nested, "a.b.c") == ["dotted"] and parse_texts(nested, "a.b") == ["whole"]
    assert parse_texts(b'{"a": {"b": {"c": "deep"}}}', "a.b.c") == ["deep"]
    assert parse_texts(nested, "t", "e", "a.b") == ["title\nwhole"]
    assert parse_texts(nested, "t", "gone") == "has no key 'gone' (--json-key), only 'a', 'a.b', 't', 'e'"
    assert parse_texts(nested, "a.x") == "has no key 'x' (--json-key), only 'b', 'b.c'"
    assert str(parse_texts(nested, "t.x")).startswith("must be a JSON object with the key 'x', got 'title'")


def test_max_chars_rejects_only_longer_texts() -> None:
    data = '{"text": "窗窗窗"}'.encode()
    assert parse_texts(data, "text", max_chars=3) == parse_texts(data, "text") == ["窗窗窗"]
    assert parse_texts(data, "text", max_chars=2) == "has 3 characters, more than --max-document-chars 2"


@settings(max_examples=150, deadline=None)
@given(VALUES, st.sampled_from(["a", "b", "a.b"]))
def test_parse_matches_python_json_on_any_value(value: object, key: str) -> None:
    data = json.dumps(value).encode()
    serialized = json.dumps(value, ensure_ascii=False)
    text = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, dict) and key == "a.b" and key not in value and isinstance(value.get("a"), dict):
        text = value["a"].get("b")
    is_valid = isinstance(text, str) and "\x00" not in text and _is_encodable(serialized)
    parsed = parse_texts(data, key)
    assert parsed == ([text.replace("\r\n", "\n")] if text else []) if is_valid else isinstance(parsed, str)


def _is_encodable(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False

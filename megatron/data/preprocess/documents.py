"""From a raw record to its text, or to the reason why it has none."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from orjson import JSONDecodeError, loads

from megatron.data.preprocess.openings import BOM
from megatron.data.preprocess.records import BadRecord, Record

_SHOWN_BYTES = 60
_SHOWN_KEYS = 8
_MARKS = re.compile(b"(?:%b)+" % BOM)
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse(record: Record, keys: Sequence[str] | None, max_chars: int = 0) -> list[str] | BadRecord:
    """Return the text of ``record`` in a list, an empty list for one without text, or why it is bad.

    A blank line, an empty file and an empty text are no fault. CRLF becomes LF, byte order marks before JSON go.

    Args:
        keys: of the text in a JSON object, "a.b" for the key b of the object at a (unless "a.b" is a key itself). The
            texts of several keys make one document, a line feed between them, empty ones left out; all must be there.
            None for plain text.
        max_chars: longer texts are bad; 0 for no limit.
    """
    data = record.data
    try:
        text = data.decode() if keys is None else _json_text(data, keys)
    except ValueError as error:
        if marks := _MARKS.match(data):  # `cat` leaves them in the middle of a file
            return parse(record._replace(data=data[marks.end() :]), keys, max_chars)
        return _bad(record, _reason(data, error)) if data.strip() else []
    if not text or (keys is None and data.isspace()):
        return []
    if "\x00" in text:
        return _bad(record, "holds a NUL character")
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    if max_chars and len(text) > max_chars:
        return _bad(record, f"has {len(text)} characters, more than --max-document-chars {max_chars}")
    return [text]


def _json_text(data: bytes, keys: Sequence[str]) -> str:
    value = loads(data)  # strict: its strings are UTF-8 and hold no lone surrogate, so nothing is left to check
    if len(keys) == 1 and type(value) is dict and type(text := value.get(keys[0])) is str:  # nearly always
        return text
    if isinstance(value, list):
        raise ValueError(
            f"must be a JSON object with the key {keys[0]!r}, got a list; "
            "of one JSON array, write each element on a line of its own: jq -c '.[]'"
        )
    return "\n".join(filter(None, [_string_at(value, key) for key in keys]))


def _string_at(value: Any, key: str) -> str:
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object with the key {key!r}, got {_kind(value)}")
    if key in value:
        if isinstance(value[key], str):
            return value[key]
        raise ValueError(f"the value of {key!r} must be a string, got {_kind(value[key])}")
    first, dot, rest = key.partition(".")
    if dot and first in value:
        return _string_at(value[first], rest)
    names = ", ".join(map(repr, list(value)[:_SHOWN_KEYS])) or "none"
    raise ValueError(f"has no key {key!r} (--json-key), only {names}")


def _kind(value: object) -> str:
    return "null" if value is None else {"dict": "an object", "list": "a list"}.get(type(value).__name__, repr(value))


def _reason(data: bytes, error: ValueError) -> str:
    """Say what is wrong, more exactly than the JSON library, for which all is one error."""
    try:
        data.decode()
    except UnicodeDecodeError as place:
        return f"not UTF-8 text ({place.reason} at {place.start})"
    if not isinstance(error, JSONDecodeError):
        return str(error)
    try:
        if _SURROGATE.search(json.dumps(json.loads(data), ensure_ascii=False)):
            return "holds a lone surrogate (half of a character)"
    except (ValueError, RecursionError):
        pass
    return f"not JSON ({error})"


def _bad(record: Record, reason: str) -> BadRecord:
    opening = record.data[:_SHOWN_BYTES].decode("utf-8", "backslashreplace")
    opening = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in opening)
    return BadRecord(record.path, record.line, record.byte_offset, reason, opening)

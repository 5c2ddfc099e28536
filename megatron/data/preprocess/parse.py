"""From a raw record to its text, or to the reason why it has none."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from megatron.data.preprocess.sources import Record

_SHOWN_BYTES = 60


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used: where it is, why, and how it begins."""

    path: str
    line: int
    byte_offset: int
    reason: str
    opening: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} (byte {self.byte_offset}): {self.reason}: {self.opening}"


def parse(record: Record, json_key: str | None) -> str | BadRecord:
    """Return the text of ``record``: plain UTF-8, or the string at ``json_key`` of a JSON object. CRLF becomes LF."""
    try:
        text = _json_text(record.data, json_key) if json_key is not None else record.data.decode("utf-8")
        text.encode("utf-8")  # a lone surrogate in a JSON escape is no text
        if "\x00" in text:
            raise ValueError("holds a NUL character")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        return _bad(record, f"not UTF-8 text ({error.reason} at {error.start})")
    except ValueError as error:
        return _bad(record, str(error))
    return text.replace("\r\n", "\n")


def _json_text(data: bytes, key: str) -> str:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object with the key {key!r}, got {_kind(value)}")
    if key not in value:
        raise ValueError(f"has no key {key!r} (--json-key), only {', '.join(map(repr, list(value)[:8])) or 'none'}")
    if not isinstance(value[key], str):
        raise ValueError(f"the value of {key!r} must be a string, got {_kind(value[key])}")
    return value[key]


def _kind(value: object) -> str:
    return "null" if value is None else {"dict": "an object", "list": "a list"}.get(type(value).__name__, repr(value))


def _bad(record: Record, reason: str) -> BadRecord:
    opening = record.data[:_SHOWN_BYTES].decode("utf-8", "backslashreplace")
    opening = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in opening)
    return BadRecord(record.path, record.line, record.byte_offset, reason, opening)

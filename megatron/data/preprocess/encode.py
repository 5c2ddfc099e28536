"""Extract text from raw records and encode it as token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from orjson import JSONDecodeError, loads

from megatron.data.preprocess.job_types import TABLES, BadRecord, Counts, Record
from megatron.data.preprocess.readers import BOM
from megatron.tokenizer import Tokenizer

# Extract a raw record's text, or the reason why the record is unusable.

_PREVIEW_BYTES = 60
_MAX_LISTED_KEYS = 8
_MARKS = re.compile(b"(?:%b)+" % BOM)
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse(record: Record, keys: Sequence[str] | None, max_chars: int = 0) -> list[str] | BadRecord:
    """Extract the text of ``record`` as a list (empty if it has no text), or a BadRecord with the reason.

    Blank lines, empty files and empty texts are not errors. CRLF is converted to LF, and byte order marks before JSON
    are removed.

    Args:
        keys: text keys in a JSON object; "a.b" is the key b in the object at a (unless "a.b" is a key itself).
            All keys must exist. Their nonempty texts are joined by line feeds into one document. None: plain text.
        max_chars: maximum length; longer texts are bad. 0: no limit.
    """
    data = record.data
    try:
        text = data.decode() if keys is None else _json_text(data, keys)
    except ValueError as error:
        if marks := _MARKS.match(data):  # files joined by `cat` have byte order marks in the middle
            return parse(record._replace(data=data[marks.end() :]), keys, max_chars)
        return _make_bad_record(record, _describe_error(data, error)) if data.strip() else []
    if not text or (keys is None and data.isspace()):
        return []
    if "\x00" in text:
        return _make_bad_record(record, "contains a NUL character")
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    if max_chars and len(text) > max_chars:
        return _make_bad_record(record, f"has {len(text)} characters, more than --max-document-chars {max_chars}")
    return [text]


def _json_text(data: bytes, keys: Sequence[str]) -> str:
    value = loads(data)  # orjson is strict: strings are valid UTF-8 without lone surrogates
    if len(keys) == 1 and type(value) is dict and type(text := value.get(keys[0])) is str:  # fast path
        return text
    if isinstance(value, list):
        raise ValueError(
            f"must be a JSON object with the key {keys[0]!r}, got a list; "
            "write each element of a JSON array on its own line: jq -c '.[]'"
        )
    return "\n".join(filter(None, [_string_at(value, key) for key in keys]))


def _string_at(value: Any, key: str) -> str:
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object with the key {key!r}, got {_describe_type(value)}")
    if key in value:
        if isinstance(value[key], str):
            return value[key]
        raise ValueError(f"the value of {key!r} must be a string, got {_describe_type(value[key])}")
    first_key, dot, remaining_key = key.partition(".")
    if dot and first_key in value:
        return _string_at(value[first_key], remaining_key)
    names = ", ".join(map(repr, list(value)[:_MAX_LISTED_KEYS])) or "none"
    raise ValueError(f"has no key {key!r} (--json-key), only {names}")


def _describe_type(value: object) -> str:
    return "null" if value is None else {"dict": "an object", "list": "a list"}.get(type(value).__name__, repr(value))


def _describe_error(data: bytes, error: ValueError) -> str:
    """Describe a record's problem more precisely than the JSON library's error."""
    try:
        data.decode()
    except UnicodeDecodeError as decode_error:
        return f"not UTF-8 text ({decode_error.reason} at {decode_error.start})"
    if not isinstance(error, JSONDecodeError):
        return str(error)
    try:
        if _SURROGATE.search(json.dumps(json.loads(data), ensure_ascii=False)):
            return "contains a lone surrogate (half of a character)"
    except (ValueError, RecursionError):
        pass
    return f"not JSON ({error})"


def _make_bad_record(record: Record, reason: str) -> BadRecord:
    opening = record.data[:_PREVIEW_BYTES].decode("utf-8", "backslashreplace")
    opening = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in opening)
    return BadRecord(record.path, record.line, record.byte_offset, reason, opening)


# Encode chunks of records as token ids.

CHUNK_BYTES = 1 << 18
"""Bytes of text per call of the tokenizer: large enough to amortize the overhead, small enough for the CPU cache."""

MAX_TEXT_CHARS = 1 << 18
"""Maximum characters of a text for the tokenizer. Longer documents are split, because the time of some tokenizers is
quadratic in the length of a text."""


@dataclass
class Encoded:
    """Concatenated token ids of a chunk's valid documents, their lengths, and the bad records."""

    tokens: np.ndarray
    lengths: np.ndarray
    bad_records: list[BadRecord]
    counts: Counts


@dataclass(frozen=True)
class Encoder:
    """Encodes record chunks.

    Args:
        json_keys: text keys in JSON records and tables; not used for plain text.
        append_eod: append the end-of-document token to each document.
        max_document_chars: maximum length; longer documents are bad. 0: no limit.
    """

    tokenizer: Tokenizer
    json_keys: Sequence[str]
    append_eod: bool
    max_document_chars: int = 0

    def encode(self, chunk: list[Record], format: str) -> Encoded:
        """Encode records in the given format."""
        keys = self.json_keys if format in ("jsonl", *TABLES) else None
        bad_records: list[BadRecord] = []
        texts: list[str] = []
        for record in chunk:
            parsed = parse(record, keys, self.max_document_chars)
            if isinstance(parsed, BadRecord):
                bad_records.append(parsed)
            else:
                texts += parsed
        tokens, lengths = self._encode_texts(texts)
        counts = Counts(
            num_bytes=sum(len(record.data) for record in chunk) + len(chunk),
            num_records=len(chunk),
            num_documents=len(lengths),
            num_tokens=len(tokens),
            num_empty=len(chunk) - len(bad_records) - len(lengths),
            num_bad=len(bad_records),
            max_token_id=int(tokens.max(initial=-1)),
        )
        return Encoded(tokens, lengths, bad_records, counts)

    def _encode_texts(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if max(map(len, texts), default=0) <= MAX_TEXT_CHARS:
            tokens, lengths = self.tokenizer.encode_arrays(texts)
        else:
            encoded = [self._encode_text(text) for text in texts]
            tokens, lengths = np.concatenate(encoded), np.array([len(ids) for ids in encoded], np.int64)
        lengths = lengths[lengths > 0]  # drop documents without tokens
        if self.append_eod:
            tokens = np.insert(tokens, np.cumsum(lengths), self.tokenizer.eod_id)
            lengths = lengths + 1
        return tokens, lengths

    def _encode_text(self, text: str) -> np.ndarray:
        """Encode a text; split only long texts, because chunks may lose trailing whitespace."""
        if len(text) > MAX_TEXT_CHARS:
            return self.tokenizer.encode_chunks(split_text(text))
        return self.tokenizer.encode_arrays([text])[0]


def chunk_records(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Group records into chunks with at least CHUNK_BYTES (the last chunk may be smaller)."""
    chunk: list[Record] = []
    size = 0
    for record in records:
        chunk.append(record)
        size += len(record.data) + 1
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def split_text(text: str) -> Iterator[str]:
    """Split ``text`` into chunks with at most ``MAX_TEXT_CHARS`` characters.

    A chunk ends after the last line end that has no whitespace on either side: byte-level BPE, and other tokenizers
    that separate words at whitespace, then return the same ids as for the unsplit text. If there is no such line end,
    the chunk ends after the last line end, else before the last space, else anywhere; a token that would span such a
    boundary is split.
    """
    start = 0
    while len(text) - start > MAX_TEXT_CHARS:
        stop = start + MAX_TEXT_CHARS
        end = _lone_line_end(text, start, stop) or text.rfind("\n", start, stop) + 1
        if end <= start:
            end = text.rfind(" ", start + 1, stop)
        if end <= start:
            end = stop
        yield text[start:end]
        start = end
    yield text[start:]


def _lone_line_end(text: str, start: int, stop: int) -> int:
    """Find the position after the last line end before ``stop`` without whitespace around it; 0 if there is none."""
    position = text.rfind("\n", start + 1, stop)
    while position > start and (text[position - 1].isspace() or text[position + 1].isspace()):
        position = text.rfind("\n", start + 1, position)
    return position + 1 if position > start else 0

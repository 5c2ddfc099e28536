"""From a raw record to text to token ids."""

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

# From a raw record to its text, or to the reason why it has none.

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


# From records to token ids: what a worker does with one chunk.

CHUNK_BYTES = 1 << 18
"""Text encoded in one go: enough that what is done per call costs nothing, little enough to stay in the cache."""

MAX_PIECE = 1 << 18
"""Characters given to a tokenizer at once: some take quadratic time on megabytes, so longer documents are cut."""


@dataclass
class Encoded:
    """Token ids of the good documents of a chunk one after the other, their lengths, and what was left out."""

    tokens: np.ndarray
    sizes: np.ndarray
    bad: list[BadRecord]
    counts: Counts


@dataclass(frozen=True)
class Encoder:
    """Turns chunks into tokens.

    Args:
        json_keys: where the text is in JSON records; plain text has none.
        append_eod: end each document with the end-of-document token.
        max_document_chars: a longer document is bad; 0 for no limit.
    """

    tokenizer: Tokenizer
    json_keys: Sequence[str]
    append_eod: bool
    max_document_chars: int = 0

    def encode(self, chunk: list[Record], format: str) -> Encoded:
        """Return the tokens of the records of a unit of this format."""
        keys = self.json_keys if format in ("jsonl", *TABLES) else None
        bad: list[BadRecord] = []
        texts: list[str] = []
        for record in chunk:
            found = parse(record, keys, self.max_document_chars)
            if isinstance(found, BadRecord):
                bad.append(found)
            else:
                texts += found
        tokens, sizes = self._encode_texts(texts)
        counts = Counts(
            num_bytes=sum(len(record.data) for record in chunk) + len(chunk),
            num_records=len(chunk),
            num_documents=len(sizes),
            num_tokens=len(tokens),
            num_empty=len(chunk) - len(bad) - len(sizes),
            num_bad=len(bad),
            max_token_id=int(tokens.max(initial=-1)),
        )
        return Encoded(tokens, sizes, bad, counts)

    def _encode_texts(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if max(map(len, texts), default=0) <= MAX_PIECE:
            tokens, sizes = self.tokenizer.encode_arrays(texts)
        else:
            encoded = [self._encode_alone(text) for text in texts]
            tokens, sizes = np.concatenate(encoded), np.array([len(ids) for ids in encoded], np.int64)
        sizes = sizes[sizes > 0]  # a text that gives no token is no document
        if self.append_eod:
            tokens = np.insert(tokens, np.cumsum(sizes), self.tokenizer.eod_id)
            sizes = sizes + 1
        return tokens, sizes

    def _encode_alone(self, text: str) -> np.ndarray:
        """Return the tokens of a text, in pieces only if it is long itself: pieces may lose blanks at its end."""
        if len(text) > MAX_PIECE:
            return self.tokenizer.encode_pieces(pieces(text))
        return self.tokenizer.encode_arrays([text])[0]


def in_chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Group records until each group holds CHUNK_BYTES."""
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


def pieces(text: str) -> Iterator[str]:
    """Cut ``text`` into parts of at most MAX_PIECE characters.

    The cut is after the last line end that stands alone between two letters: BPE of bytes and whatever else parts words
    at blanks gives the same ids with and without it. Else it is after the last line end, else before the last space,
    else anywhere; a token that would span the cut then comes as two.
    """
    start = 0
    while len(text) - start > MAX_PIECE:
        stop = start + MAX_PIECE
        end = _lone_line_end(text, start, stop) or text.rfind("\n", start, stop) + 1
        if end <= start:
            end = text.rfind(" ", start + 1, stop)
        if end <= start:
            end = stop
        yield text[start:end]
        start = end
    yield text[start:]


def _lone_line_end(text: str, start: int, stop: int) -> int:
    """Return the place behind the last line end before ``stop`` with no blank on either side, 0 if there is none."""
    place = text.rfind("\n", start + 1, stop)
    while place > start and (text[place - 1].isspace() or text[place + 1].isspace()):
        place = text.rfind("\n", start + 1, place)
    return place + 1 if place > start else 0

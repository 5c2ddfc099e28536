"""Encoding a chunk of records: what one process does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from megatron.data.preprocess.parse import BadRecord, parse
from megatron.data.preprocess.sources import Record
from megatron.tokenizer import Tokenizer

MAX_PIECE = 1 << 18
"""Characters encoded at once: some tokenizers take quadratic time on megabytes, so longer documents are cut."""


@dataclass
class Encoded:
    """Token ids of the good documents of a chunk one after the other, their lengths, and what was left out."""

    tokens: np.ndarray
    sizes: np.ndarray
    bad: list[BadRecord] = field(default_factory=list)
    num_empty: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class Encoder:
    """Turns a chunk into tokens.

    Args:
        make_tokenizer: called once in each process.
        json_key: key of the text in JSON records; None for plain text.
        append_eod: end each document with the end-of-document token.
    """

    make_tokenizer: Callable[[], Tokenizer]
    json_key: str | None
    append_eod: bool

    def encode(self, chunk: list[Record], tokenizer: Tokenizer) -> Encoded:
        """Return the tokens of the chunk."""
        texts, bad, num_empty = self._texts(chunk)
        end = np.array([tokenizer.eod_id] if self.append_eod else [], np.int32)
        documents = [np.concatenate([ids, end]) for ids in _encode_texts(texts, tokenizer)]
        sizes = np.array([len(ids) for ids in documents], np.int64)
        tokens = np.concatenate([*documents, np.zeros(0, np.int32)])
        return Encoded(tokens, sizes, bad, num_empty, sum(len(record.data) + 1 for record in chunk))

    def _texts(self, chunk: list[Record]) -> tuple[list[str], list[BadRecord], int]:
        results = [parse(record, self.json_key) for record in chunk]
        bad = [result for result in results if isinstance(result, BadRecord)]
        texts = [result for result in results if isinstance(result, str) and result]
        return texts, bad, len(results) - len(bad) - len(texts)


def _encode_texts(texts: list[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    encoded = iter(tokenizer.encode_batch([text for text in texts if len(text) <= MAX_PIECE]))
    return [
        np.array(next(encoded), np.int32) if len(text) <= MAX_PIECE else _encode_long(text, tokenizer) for text in texts
    ]


def _encode_long(text: str, tokenizer: Tokenizer) -> np.ndarray:
    return np.concatenate([np.array(tokenizer.encode(piece), np.int32) for piece in pieces(text)])


def pieces(text: str) -> Iterator[str]:
    """Cut ``text`` into parts of at most MAX_PIECE characters: after the last line end there, else before the last
    space, else anywhere."""
    start = 0
    while len(text) - start > MAX_PIECE:
        stop = text.rfind("\n", start, start + MAX_PIECE) + 1
        if stop <= start:
            stop = text.rfind(" ", start + 1, start + MAX_PIECE)
        if stop <= start:
            stop = start + MAX_PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]

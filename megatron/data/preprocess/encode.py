"""From records to token ids: what a worker does with one chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.data.preprocess.counts import Counts
from megatron.data.preprocess.documents import parse
from megatron.data.preprocess.records import BadRecord, Record
from megatron.tokenizer import Tokenizer

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
        keys = self.json_keys if format in ("jsonl", "parquet") else None
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

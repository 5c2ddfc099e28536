"""Supervised fine-tuning: conversations as tokenized documents with a loss on some tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np

from megatron import log
from megatron.data.blend_paths import BlendPaths
from megatron.data.cache import IndexCache
from megatron.data.conversations import Conversation, RecordFile, parse_record
from megatron.data.dataset_builder import OpenCorpus, SplitDatasets, build_datasets
from megatron.data.documents import Documents
from megatron.data.gpt_builder import MIN_PACKED_TOKENS
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import DataError
from megatron.tokenizer.chat import ChatTemplate

# A conversation is one document. A file is encoded in chunks of 2048 conversations. A host's processes share this
# work, and the chunks are stored in the host's cache. A chunk is one int32 array:
#
# | values | content |
# |---|---|
# | 4 | numbers of conversations that are truncated, dropped (no loss), parsed differently since 2026-12; k |
# | k | UTF-8 bytes of a JSON list: the record keys that have no effect |
# | n | tokens per conversation; 0 if it is dropped |
# | n | each conversation's line, counted from 1 |
# | remaining | token ids; a token id with a loss is stored as ~id, a negative number |

OVERLONG_POLICIES = ("cut", "refuse")
_CHUNK_CONVERSATIONS = 2048
_IN_MEMORY_BELOW_BYTES = 1 << 20
_FORMAT = 2
_NUM_COUNTS = 4
_MAX_LISTED_KEYS = 8


@dataclass(frozen=True)
class _EncodedChunk:
    """A decoded chunk; see the table at the top of this file."""

    num_truncated: int
    num_dropped: int
    num_changed: int
    unused_keys: list[str]
    lengths: np.ndarray
    lines: np.ndarray
    tokens: np.ndarray

    @classmethod
    def decode(cls, array: np.ndarray, count: int) -> _EncodedChunk:
        """Decode ``array``, a chunk with ``count`` conversations."""
        num_truncated, num_dropped, num_changed, num_bytes = array[:_NUM_COUNTS].tolist()
        start = _NUM_COUNTS + num_bytes
        unused_keys = json.loads(array[_NUM_COUNTS:start].astype(np.uint8).tobytes())
        lengths, lines, tokens = np.split(array[start:], [count, 2 * count])
        return cls(num_truncated, num_dropped, num_changed, unused_keys, lengths, lines, tokens)


class ConversationFile:
    """Conversations in a file (``RecordFile``) as tokenized documents, with the interface of ``IndexedDataset``.

    ``document_lengths`` (int32) has the tokens per conversation, 0 for a conversation without a loss.
    ``read`` returns signed ids: ``~id``, which is negative, for tokens with a loss.

    Args:
        capacity: tokens per sample; a longer conversation is truncated at its end, or rejected.
        overlong: "cut" to truncate or "refuse" to reject overlong conversations (``OVERLONG_POLICIES``).
        cache: stores the tokens for this host's processes and for later runs; None: they are stored in memory.

    Raises:
        DataError: a record is not a conversation, is rejected by the template, or is too long; or there is no
            conversation.
    """

    sidecar = None
    dtype = np.dtype(np.int32)

    def __init__(
        self,
        path: str | Path,
        template: ChatTemplate,
        *,
        capacity: int,
        overlong: str = "cut",
        cache: IndexCache | None = None,
    ) -> None:
        if overlong not in OVERLONG_POLICIES:
            raise ValueError(f"overlong must be one of {', '.join(OVERLONG_POLICIES)}, got {overlong!r}")
        self.prefix, self.token_path = str(path), Path(path)
        self.template, self.capacity, self.overlong = template, capacity, overlong
        with RecordFile(path) as self._records:
            self._digest = self._records.digest
            arrays = self._encoded_arrays(cache)
        chunks = [
            _EncodedChunk.decode(array, self._num_conversations(chunk_idx)) for chunk_idx, array in enumerate(arrays)
        ]
        self.document_lengths = np.concatenate([chunk.lengths for chunk in chunks])
        self._lines, self._tokens = [chunk.lines for chunk in chunks], [chunk.tokens for chunk in chunks]
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.document_lengths, dtype=np.int64)])
        self.num_documents, self.num_tokens = len(self.document_lengths), int(self._bounds[-1])
        self.num_truncated, self.num_dropped = (
            sum(chunk.num_truncated for chunk in chunks),
            sum(chunk.num_dropped for chunk in chunks),
        )
        self._differs_from_v1 = any(chunk.num_changed for chunk in chunks)
        self.unused_keys = sorted({name for chunk in chunks for name in chunk.unused_keys})
        """Record keys that have no effect."""
        self._warn_about_records()

    @cached_property
    def fingerprint(self) -> str:
        """Short digest of the file, the template and the interpretation of the records.

        If earlier releases read the file in the same way, the fingerprint is the same as in their checkpoints.
        """
        key = f"{self._digest}:{self.template.key}"
        if self._differs_from_v1:
            key += f":2:{self.template.tools_key}"
        return hashlib.sha256(key.encode()).hexdigest()[:16]

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Copy ``length`` signed ids of a conversation, starting at ``offset`` (None: up to its end)."""
        size = int(self.document_lengths[document])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise DataError(
                f"{self.location(document)}: tokens {offset}:{offset + length} of a conversation of {size} were "
                "requested"
            )
        chunk_idx = document // _CHUNK_CONVERSATIONS
        start = int(self._bounds[document] - self._bounds[chunk_idx * _CHUNK_CONVERSATIONS]) + offset
        return self._tokens[chunk_idx][start : start + length].copy()

    def read_tokens(self, start: int, count: int) -> np.ndarray:
        """Copy ``count`` signed ids, starting at token ``start`` of the file, across conversations."""
        bounds = np.cumsum([0, *map(len, self._tokens)])
        chunks = [np.zeros(0, np.int32)]
        for chunk_idx in range(int(np.searchsorted(bounds, start, "right")) - 1, len(self._tokens)):
            first = int(bounds[chunk_idx])
            chunks.append(self._tokens[chunk_idx][max(start - first, 0) : max(start + count - first, 0)])
            if start + count <= bounds[chunk_idx + 1]:
                break
        return np.concatenate(chunks)

    def starts_of(self, first: int, stop: int) -> np.ndarray:
        """Compute int64[stop - first + 1], the starts of conversations first ... stop - 1 and the last one's end."""
        return self._bounds[first : stop + 1]

    def location(self, document: int) -> str:
        """Format a conversation's position as "FILE:LINE"."""
        return f"{self.prefix}:{int(self._lines[document // _CHUNK_CONVERSATIONS][document % _CHUNK_CONVERSATIONS])}"

    def _encoded_arrays(self, cache: IndexCache | None) -> list[np.ndarray]:
        num_chunks = -(-len(self._records.spans) // _CHUNK_CONVERSATIONS)
        if cache is None or self._records.size < _IN_MEMORY_BELOW_BYTES:
            return [np.concatenate(list(self._encode_chunk(chunk_idx))) for chunk_idx in range(num_chunks)]
        key = (
            _FORMAT,
            _CHUNK_CONVERSATIONS,
            self._digest,
            self.template.key,
            self.template.tools_key,
            self.template.tokenizer.identity,
            self.capacity,
            self.overlong,
        )
        name = f"sft-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
        return cache.arrays(name, num_chunks, self._encode_chunk, is_durable=True)

    def _num_conversations(self, chunk_idx: int) -> int:
        return min(_CHUNK_CONVERSATIONS, len(self._records.spans) - chunk_idx * _CHUNK_CONVERSATIONS)

    def _encode_chunk(self, chunk_idx: int) -> Iterator[np.ndarray]:
        """Encode a chunk into arrays in the order of the table at the top of this file."""
        if chunk_idx == 1:
            log.info(f"{self.prefix}: encoding {len(self._records.spans)} conversations")
        first = chunk_idx * _CHUNK_CONVERSATIONS
        lines = self._records.spans[first : first + _CHUNK_CONVERSATIONS, 0]
        rows, counts, unused_keys = list[np.ndarray](), np.zeros(_NUM_COUNTS, np.int32), set[str]()
        for idx, line in enumerate(lines.tolist(), first):
            row, conversation = self._encode_record(self._records.read(idx), line)
            counts[0] += len(row) > self.capacity
            row = row[: self.capacity]
            has_loss = bool((row[1:] < 0).any())  # the first token is never predicted
            counts[1] += not has_loss
            counts[2] += conversation.differs_from_v1 or bool(
                self.template.tools_key and "tools" in conversation.template_variables
            )
            unused_keys |= conversation.unused_keys
            unused_keys |= {key for key, name in conversation.template_keys.items() if not self.template.mentions(name)}
            rows.append(row if has_loss else row[:0])
        keys_json = json.dumps(sorted(unused_keys)).encode()
        counts[3] = len(keys_json)
        yield counts
        yield np.frombuffer(keys_json, np.uint8).astype(np.int32)
        yield np.array([len(row) for row in rows], np.int32)
        yield lines.astype(np.int32)
        yield np.concatenate(rows)

    def _encode_record(self, record: bytes, line_number: int) -> tuple[np.ndarray, Conversation]:
        """Encode a record that begins on line ``line_number`` into signed ids, together with its conversation.

        Raises:
            DataError: the record is invalid or too long; the message names the line.
        """
        try:
            conversation = parse_record(record)
            encoded = self.template.encode(
                conversation.messages, without_loss=conversation.without_loss, **conversation.template_variables
            )
        except ValueError as error:  # includes DataError
            raise DataError(f"{self.prefix}:{line_number}: {error}") from error
        ids = np.array(encoded.ids, np.int32)
        if self.overlong == "refuse" and len(ids) > self.capacity:
            raise DataError(
                f"{self.prefix}:{line_number}: a conversation must have at most --seq-length + 1 = {self.capacity} "
                f"tokens, got {len(ids)}. Increase --seq-length, shorten the conversation, or truncate with "
                "--sft-overlong cut"
            )
        return np.where(np.array(encoded.has_loss, bool), ~ids, ids), conversation

    def _warn_about_records(self) -> None:
        if self.num_truncated or self.num_dropped:
            log.warn_once(
                f"{self.prefix}: {self.num_truncated} of {self.num_documents} conversations are longer than "
                f"--seq-length + 1 = {self.capacity} tokens and are truncated at the end; {self.num_dropped} have no "
                "token with a loss and are dropped. --sft-overlong refuse reports the first one as an error instead"
            )
        if self.unused_keys:
            names = ", ".join(self.unused_keys[:_MAX_LISTED_KEYS]) + (
                ", ..." if len(self.unused_keys) > _MAX_LISTED_KEYS else ""
            )
            names = names.encode("utf-8", "backslashreplace").decode()  # a log cannot show a lone surrogate
            log.warn_once_per_job(
                f"{self.prefix}: keys that have no effect because neither training nor the template reads them: {names}"
            )


class SFTDataset(GPTDataset):
    """Endless samples with conversations packed best-fit into separate segments.

    A sample is {"text": int64[L + 1], "segments": int32[L + 1], "loss_mask": int32[L + 1]}. "text" and "segments" are
    as in ``GPTDataset`` with best-fit packing. "loss_mask" is 1 for the assistant's tokens that have a loss.
    """

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        sample = super().__getitem__(index)
        assert isinstance(sample, dict)
        signed_ids = sample["text"]
        has_loss = signed_ids < 0
        return {**sample, "text": np.where(has_loss, ~signed_ids, signed_ids), "loss_mask": has_loss.astype(np.int32)}


def build_sft_train_valid_test(
    paths: BlendPaths,
    *,
    seq_length: int,
    seed: int,
    template: ChatTemplate,
    overlong: str = "cut",
    needed: Sequence[bool] = (True, True, True),
) -> SplitDatasets:
    """Build the training, validation and test datasets from conversations; None for a split that is not needed.

    Args:
        paths: conversation file paths instead of token files (``DataConfig.corpora``).
        template: the chat template with the run's tokenizer.
        overlong: see ``ConversationFile``.

    Raises:
        DataError: see ``ConversationFile``; or paths, weights or splits are invalid.
    """

    if problem := template.end_of_turn_problem:
        log.warn_once_per_job(problem)

    def open_corpus(path: str, cache: IndexCache) -> OpenCorpus:
        file = ConversationFile(path, template, capacity=seq_length + 1, overlong=overlong, cache=cache)

        def make_dataset(documents: Documents, draws: str) -> SFTDataset:
            return SFTDataset(
                file,
                documents=documents,
                seq_length=seq_length,
                seed=seed,
                packing="best-fit",
                cache=cache,
                draws=draws,
            )

        token_file = cast(IndexedDataset, file)  # has all attributes that are used
        return OpenCorpus(
            token_file,
            file.fingerprint,
            make_dataset,
            MIN_PACKED_TOKENS,
            f"--seq-length {seq_length}",
            has_random_draws=False,
        )

    return build_datasets(paths, needed, open_corpus, template.tokenizer.identity, lambda parts: seq_length)

"""Supervised fine-tuning: conversations as tokenized documents with a loss on some of the tokens."""

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
from megatron.data.dataset_builder import OpenCorpus, Three, build_datasets
from megatron.data.documents import Documents
from megatron.data.gpt_builder import SHORTEST_PACKED
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import DataError
from megatron.tokenizer.chat import ChatTemplate

# A conversation is one document. A file is encoded in parts of 2048 conversations. All processes of a host share this
# work, and the parts are stored in the host's cache. A part is one array of int32:
#
# | number of values | content |
# |---|---|
# | 4 | numbers of conversations that are truncated, dropped (no loss), read differently than before 2026-12; k |
# | k | UTF-8 bytes of a JSON list: the record keys that have no effect |
# | n | number of tokens of each conversation; 0 if it is dropped |
# | n | the line of each conversation, counted from 1 |
# | remaining | token ids; the id of a token with a loss is stored as ~id, a negative number |

OVERLONG = ("cut", "refuse")
_LINES_AT_ONCE = 2048
_IN_MEMORY_BELOW_BYTES = 1 << 20
_FORMAT = 2
_COUNTS = 4
_KEYS_SHOWN = 8


@dataclass(frozen=True)
class _Part:
    """A decoded part; see the table at the top of this file."""

    num_cut: int
    num_left_out: int
    num_changed: int
    unread: list[str]
    sizes: np.ndarray
    lines: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(cls, array: np.ndarray, count: int) -> _Part:
        """Decode ``array``, a part of ``count`` conversations."""
        num_cut, num_left_out, num_changed, num_bytes = array[:_COUNTS].tolist()
        start = _COUNTS + num_bytes
        unread = json.loads(array[_COUNTS:start].astype(np.uint8).tobytes())
        sizes, lines, tokens = np.split(array[start:], [count, 2 * count])
        return cls(num_cut, num_left_out, num_changed, unread, sizes, lines, tokens)


class ConversationFile:
    """The conversations of a file (``RecordFile``) as tokenized documents, with the interface of ``IndexedDataset``.

    ``sizes`` (int32) has the number of tokens of each conversation, 0 for a conversation without a loss. ``read``
    returns signed ids: ``~id``, which is negative, for tokens with a loss.

    Args:
        capacity: tokens of a sample; a longer conversation is truncated at its end, or rejected.
        overlong: "cut" to truncate or "refuse" to reject overlong conversations (``OVERLONG``).
        cache: stores the tokens for the processes of this host and for later runs; None: they are stored in memory.

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
        if overlong not in OVERLONG:
            raise ValueError(f"overlong must be one of {', '.join(OVERLONG)}, got {overlong!r}")
        self.prefix, self.token_path = str(path), Path(path)
        self.template, self.capacity, self.overlong = template, capacity, overlong
        with RecordFile(path) as self._records:
            self._digest = self._records.digest
            arrays = self._parts(cache)
        parts = [_Part.of(array, self._count_in(part_idx)) for part_idx, array in enumerate(arrays)]
        self.sizes = np.concatenate([part.sizes for part in parts])
        self._lines, self._tokens = [part.lines for part in parts], [part.tokens for part in parts]
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes, dtype=np.int64)])
        self.num_documents, self.num_tokens = len(self.sizes), int(self._bounds[-1])
        self.num_cut, self.num_left_out = sum(part.num_cut for part in parts), sum(part.num_left_out for part in parts)
        self._differs_from_v1 = any(part.num_changed for part in parts)
        self.unread = sorted({name for part in parts for name in part.unread})
        """Record keys that have no effect."""
        self._note_lengths()

    @cached_property
    def fingerprint(self) -> str:
        """A short digest of the file, the template and the interpretation of the records.

        If earlier releases read the file in the same way, the fingerprint is the same as in their checkpoints.
        """
        key = f"{self._digest}:{self.template.key}"
        if self._differs_from_v1:
            key += f":2:{self.template.tools_key}"
        return hashlib.sha256(key.encode()).hexdigest()[:16]

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return a copy of ``length`` signed ids of a conversation from ``offset`` on (None: up to its end)."""
        size = int(self.sizes[document])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise DataError(
                f"{self.place(document)}: tokens {offset}:{offset + length} of a conversation of {size} were requested"
            )
        part = document // _LINES_AT_ONCE
        start = int(self._bounds[document] - self._bounds[part * _LINES_AT_ONCE]) + offset
        return self._tokens[part][start : start + length].copy()

    def read_tokens(self, start: int, count: int) -> np.ndarray:
        """Return ``count`` signed ids from token ``start`` of the file on, across conversations."""
        bounds = np.cumsum([0, *map(len, self._tokens)])
        chunks = [np.zeros(0, np.int32)]
        for part in range(int(np.searchsorted(bounds, start, "right")) - 1, len(self._tokens)):
            first = int(bounds[part])
            chunks.append(self._tokens[part][max(start - first, 0) : max(start + count - first, 0)])
            if start + count <= bounds[part + 1]:
                break
        return np.concatenate(chunks)

    def starts_of(self, first: int, stop: int) -> np.ndarray:
        """Return int64[stop - first + 1], the starts of conversations first ... stop - 1 and the end of the last."""
        return self._bounds[first : stop + 1]

    def place(self, document: int) -> str:
        """Return the file and line of a conversation as "FILE:LINE"."""
        return f"{self.prefix}:{int(self._lines[document // _LINES_AT_ONCE][document % _LINES_AT_ONCE])}"

    def _parts(self, cache: IndexCache | None) -> list[np.ndarray]:
        count = -(-len(self._records.spans) // _LINES_AT_ONCE)
        if cache is None or self._records.size < _IN_MEMORY_BELOW_BYTES:
            return [np.concatenate(list(self._encoded(part_idx))) for part_idx in range(count)]
        key = (
            _FORMAT,
            _LINES_AT_ONCE,
            self._digest,
            self.template.key,
            self.template.tools_key,
            self.template.tokenizer.identity,
            self.capacity,
            self.overlong,
        )
        name = f"sft-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
        return cache.arrays(name, count, self._encoded, outlives_boot=True)

    def _count_in(self, part: int) -> int:
        return min(_LINES_AT_ONCE, len(self._records.spans) - part * _LINES_AT_ONCE)

    def _encoded(self, part: int) -> Iterator[np.ndarray]:
        """Encode a part and yield its arrays in the order of the table at the top of this file."""
        if part == 1:
            log.info(f"{self.prefix}: encoding {len(self._records.spans)} conversations")
        first = part * _LINES_AT_ONCE
        lines = self._records.spans[first : first + _LINES_AT_ONCE, 0]
        rows, counts, unread = list[np.ndarray](), np.zeros(_COUNTS, np.int32), set[str]()
        for idx, line in enumerate(lines.tolist(), first):
            row, conversation = self._row(self._records.read(idx), line)
            counts[0] += len(row) > self.capacity
            row = row[: self.capacity]
            has_loss = bool((row[1:] < 0).any())  # the first token is never predicted
            counts[1] += not has_loss
            counts[2] += conversation.differs_from_v1 or bool(self.template.tools_key and "tools" in conversation.more)
            unread |= conversation.unread
            unread |= {key for key, name in conversation.passed.items() if not self.template.reads(name)}
            rows.append(row if has_loss else row[:0])
        names = json.dumps(sorted(unread)).encode()
        counts[3] = len(names)
        yield counts
        yield np.frombuffer(names, np.uint8).astype(np.int32)
        yield np.array([len(row) for row in rows], np.int32)
        yield lines.astype(np.int32)
        yield np.concatenate(rows)

    def _row(self, record: bytes, number: int) -> tuple[np.ndarray, Conversation]:
        """Return the signed ids and the conversation of a record that begins on line ``number``.

        Raises:
            DataError: the record is invalid or too long; the message names the line.
        """
        try:
            conversation = parse_record(record)
            encoded = self.template.encode(
                conversation.messages, without_loss=conversation.without_loss, **conversation.more
            )
        except ValueError as error:  # includes DataError
            raise DataError(f"{self.prefix}:{number}: {error}") from error
        ids = np.array(encoded.ids, np.int32)
        if self.overlong == "refuse" and len(ids) > self.capacity:
            raise DataError(
                f"{self.prefix}:{number}: a conversation must have at most --seq-length + 1 = {self.capacity} tokens, "
                f"got {len(ids)}. Increase --seq-length, shorten the conversation, or truncate with --sft-overlong cut"
            )
        return np.where(np.array(encoded.is_said, bool), ~ids, ids), conversation

    def _note_lengths(self) -> None:
        if self.num_cut or self.num_left_out:
            log.warn_once(
                f"{self.prefix}: {self.num_cut} of {self.num_documents} conversations are longer than --seq-length + 1 "
                f"= {self.capacity} tokens and are truncated at the end; {self.num_left_out} have no token with a "
                "loss and are dropped. --sft-overlong refuse reports the first one as an error instead"
            )
        if self.unread:
            names = ", ".join(self.unread[:_KEYS_SHOWN]) + (", ..." if len(self.unread) > _KEYS_SHOWN else "")
            names = names.encode("utf-8", "backslashreplace").decode()  # a log cannot show a lone surrogate
            log.warn_once_per_job(
                f"{self.prefix}: keys that have no effect because neither training nor the template reads them: {names}"
            )


class SFTDataset(GPTDataset):
    """Endless samples of conversations packed best-fit into separate segments.

    A sample is {"text": int64[L + 1], "segments": int32[L + 1], "loss_mask": int32[L + 1]}. "text" and "segments" are
    as in ``GPTDataset`` with best-fit packing. "loss_mask" is 1 for the tokens of the assistant that have a loss.
    """

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        sample = super().__getitem__(index)
        assert isinstance(sample, dict)
        signed = sample["text"]
        has_loss = signed < 0
        return {**sample, "text": np.where(has_loss, ~signed, signed), "loss_mask": has_loss.astype(np.int32)}


def build_sft_train_valid_test(
    paths: BlendPaths,
    *,
    seq_length: int,
    seed: int,
    template: ChatTemplate,
    overlong: str = "cut",
    needed: Sequence[bool] = (True, True, True),
) -> Three:
    """Return the training, validation and test datasets from conversations; None for a split that is not needed.

    Args:
        paths: paths of conversation files instead of token files (``DataConfig.corpora``).
        template: the chat template with the tokenizer of the run.
        overlong: see ``ConversationFile``.

    Raises:
        DataError: see ``ConversationFile``; or paths, weights or splits are invalid.
    """

    if problem := template.end_of_turn_problem:
        log.warn_once_per_job(problem)

    def open_corpus(path: str, cache: IndexCache) -> OpenCorpus:
        file = ConversationFile(path, template, capacity=seq_length + 1, overlong=overlong, cache=cache)

        def make(documents: Documents, draws: str) -> SFTDataset:
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
            token_file, file.fingerprint, make, SHORTEST_PACKED, f"--seq-length {seq_length}", is_drawn=False
        )

    return build_datasets(paths, needed, open_corpus, template.tokenizer.identity, lambda parts: seq_length)

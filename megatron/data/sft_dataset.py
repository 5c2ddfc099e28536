"""Supervised fine-tuning: conversations as documents of tokens, of which some have a loss."""

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

# A conversation is one document. A file is encoded in parts of some thousand conversations, by all processes of a host
# together, and saved in its cache. A part is one array of int32:
#
# | number of values | content |
# |---|---|
# | 4 | conversations cut, those left out because no token with a loss is left, those that v1 read otherwise, and k |
# | k | UTF-8 bytes of a JSON list: the keys of the records that have no effect |
# | n | number of tokens of each conversation; 0 if it is left out |
# | n | the line of each, counted from 1 |
# | the rest | token ids; an id with a loss is stored as ~id, a negative number |

OVERLONG = ("cut", "refuse")
_LINES_AT_ONCE = 2048
_IN_MEMORY_BELOW_BYTES = 1 << 20
_FORMAT = 2
_COUNTS = 4
_KEYS_SHOWN = 8


@dataclass(frozen=True)
class _Part:
    """An array of the table at the top of this file, taken apart."""

    num_cut: int
    num_left_out: int
    num_changed: int
    unread: list[str]
    sizes: np.ndarray
    lines: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(cls, array: np.ndarray, count: int) -> _Part:
        """Return the content of ``array``, a part of ``count`` conversations."""
        num_cut, num_left_out, num_changed, num_bytes = array[:_COUNTS].tolist()
        start = _COUNTS + num_bytes
        unread = json.loads(array[_COUNTS:start].astype(np.uint8).tobytes())
        sizes, lines, tokens = np.split(array[start:], [count, 2 * count])
        return cls(num_cut, num_left_out, num_changed, unread, sizes, lines, tokens)


class ConversationFile:
    """The conversations of a file (``RecordFile``) as documents; stands in for an ``IndexedDataset``.

    ``sizes`` int32 is the number of tokens of each, 0 of one without a loss. What is read are signed ids: ``~id``,
    which is negative, where the token has a loss.

    Args:
        capacity: tokens of a sample; a longer conversation is cut from its end, or refused.
        overlong: a name of ``OVERLONG``.
        cache: where the tokens are kept for the processes of this host, and for later runs; None: in memory.

    Raises:
        DataError: a record that is no conversation, that the template refuses, or that is too long; no conversation.
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
        parts = [_Part.of(array, self._count_in(number)) for number, array in enumerate(arrays)]
        self.sizes = np.concatenate([part.sizes for part in parts])
        self._lines, self._tokens = [part.lines for part in parts], [part.tokens for part in parts]
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes, dtype=np.int64)])
        self.num_documents, self.num_tokens = len(self.sizes), int(self._bounds[-1])
        self.num_cut, self.num_left_out = sum(part.num_cut for part in parts), sum(part.num_left_out for part in parts)
        self._differs_from_v1 = any(part.num_changed for part in parts)
        self.unread = sorted({name for part in parts for name in part.unread})
        """Keys of the records that have no effect."""
        self._note_lengths()

    @cached_property
    def fingerprint(self) -> str:
        """A short text that changes with the file, the template, and how the file's records are read.

        A file that earlier releases read in the same way has the fingerprint that their checkpoints contain.
        """
        named = f"{self._digest}:{self.template.key}"
        if self._differs_from_v1:
            named += f":2:{self.template.tools_key}"
        return hashlib.sha256(named.encode()).hexdigest()[:16]

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return a copy of ``length`` signed ids of a conversation from ``offset`` on (all that follow if None)."""
        size = int(self.sizes[document])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise DataError(f"{self.place(document)}: tokens {offset}:{offset + length} of a conversation of {size}")
        part = document // _LINES_AT_ONCE
        start = int(self._bounds[document] - self._bounds[part * _LINES_AT_ONCE]) + offset
        return self._tokens[part][start : start + length].copy()

    def read_tokens(self, start: int, count: int) -> np.ndarray:
        """Return ``count`` signed ids from number ``start`` of the whole file on, across conversations."""
        bounds = np.cumsum([0, *map(len, self._tokens)])
        found = [np.zeros(0, np.int32)]
        for part in range(int(np.searchsorted(bounds, start, "right")) - 1, len(self._tokens)):
            first = int(bounds[part])
            found.append(self._tokens[part][max(start - first, 0) : max(start + count - first, 0)])
            if start + count <= bounds[part + 1]:
                break
        return np.concatenate(found)

    def starts_of(self, first: int, stop: int) -> np.ndarray:
        """Return int64[stop - first + 1], where conversations first ... stop - 1 start and where the last one ends."""
        return self._bounds[first : stop + 1]

    def place(self, document: int) -> str:
        """Return file and line of a conversation."""
        return f"{self.prefix}:{int(self._lines[document // _LINES_AT_ONCE][document % _LINES_AT_ONCE])}"

    def _parts(self, cache: IndexCache | None) -> list[np.ndarray]:
        count = -(-len(self._records.spans) // _LINES_AT_ONCE)
        if cache is None or self._records.size < _IN_MEMORY_BELOW_BYTES:
            return [np.concatenate(list(self._encoded(number))) for number in range(count)]
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
        """Yield the arrays of a part, as the table at the top of this file has them."""
        if part == 1:
            log.info(f"{self.prefix}: encoding {len(self._records.spans)} conversations")
        first = part * _LINES_AT_ONCE
        lines = self._records.spans[first : first + _LINES_AT_ONCE, 0]
        rows, counts, unread = list[np.ndarray](), np.zeros(_COUNTS, np.int32), set[str]()
        for idx, number in enumerate(lines.tolist(), first):
            row, conversation = self._row(self._records.read(idx), number)
            counts[0] += len(row) > self.capacity
            row = row[: self.capacity]
            has_loss = bool((row[1:] < 0).any())  # a first token is never predicted
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
        """Return the signed ids of a record that begins on line ``number``, and its conversation.

        Raises:
            DataError: naming the line.
        """
        try:
            conversation = parse_record(record)
            encoded = self.template.encode(
                conversation.messages, without_loss=conversation.without_loss, **conversation.more
            )
        except ValueError as error:  # DataError too
            raise DataError(f"{self.prefix}:{number}: {error}") from error
        ids = np.array(encoded.ids, np.int32)
        if self.overlong == "refuse" and len(ids) > self.capacity:
            raise DataError(
                f"{self.prefix}:{number}: a conversation must have at most --seq-length + 1 = {self.capacity} tokens, "
                f"got {len(ids)}. Raise --seq-length, shorten it, or cut such ones with --sft-overlong cut"
            )
        return np.where(np.array(encoded.is_said, bool), ~ids, ids), conversation

    def _note_lengths(self) -> None:
        if self.num_cut or self.num_left_out:
            log.warn_once(
                f"{self.prefix}: of {self.num_documents} conversations {self.num_cut} are longer than --seq-length + 1 "
                f"= {self.capacity} tokens and are cut from the end; {self.num_left_out} have no token with a "
                "loss and are left out. --sft-overlong refuse names the first instead"
            )
        if self.unread:
            shown = ", ".join(self.unread[:_KEYS_SHOWN]) + (", ..." if len(self.unread) > _KEYS_SHOWN else "")
            shown = shown.encode("utf-8", "backslashreplace").decode()  # a log cannot show a lone surrogate
            log.warn_once_per_job(f"{self.prefix}: keys that have no effect, neither here nor in the template: {shown}")


class SFTDataset(GPTDataset):
    """Sample i, for any i >= 0, are conversations packed best-fit and kept apart.

    A sample is {"text": int64[L + 1], "segments": int32[L + 1], "loss_mask": int32[L + 1]}: as ``GPTDataset`` with
    best-fit packing, and 1 where the assistant says the token.
    """

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        sample = super().__getitem__(index)
        assert isinstance(sample, dict)
        signed = sample["text"]
        is_said = signed < 0
        return {**sample, "text": np.where(is_said, ~signed, signed), "loss_mask": is_said.astype(np.int32)}


def build_sft_train_valid_test(
    paths: BlendPaths,
    *,
    seq_length: int,
    seed: int,
    template: ChatTemplate,
    overlong: str = "cut",
    needed: Sequence[bool] = (True, True, True),
) -> Three:
    """Return the samples of train, valid and test from files of conversations; None for a split that is not needed.

    Args:
        paths: files of conversations where token files are named else (``DataConfig.corpora``).
        template: the chat template with the tokenizer of the run.
        overlong: as ``ConversationFile``.

    Raises:
        DataError: as ``ConversationFile``; paths, weights and splits that cannot be used.
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

        found = cast(IndexedDataset, file)  # it has all that is asked of one
        return OpenCorpus(found, file.fingerprint, make, SHORTEST_PACKED, f"--seq-length {seq_length}", is_drawn=False)

    return build_datasets(paths, needed, open_corpus, template.tokenizer.identity, lambda parts: seq_length)

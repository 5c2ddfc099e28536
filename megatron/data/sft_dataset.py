"""Supervised fine-tuning: conversations in JSON lines as documents of tokens, of which some have a loss."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from megatron import log
from megatron.data.cache import IndexCache
from megatron.data.dataset_builder import BlendPaths, OpenCorpus, Three, build_datasets
from megatron.data.gpt_dataset import SHORTEST_PACKED, GPTDataset
from megatron.data.indexed_dataset import Documents, IndexedDataset
from megatron.errors import DataError
from megatron.tokenizer.chat import ASSISTANT, ChatTemplate

# Lines of a file of conversations:
#
# | line | is read as |
# |---|---|
# | {"messages": [{"role": "user", "content": "..."}, ...]} | what it says (OpenAI's, TRL's form) |
# | {"conversations": [{"from": "human", "value": "..."}, ...]} | the same (ShareGPT's form); "system" beside it, too |
# | beside them "tools": [...], "chat_template_kwargs": {...} | given to the template |
#
# A conversation is one document. A file is encoded in parts of some thousand lines, by all processes of a host
# together, and kept in its cache. A part is one array of int32:
#
# | numbers | hold |
# |---|---|
# | 2 | conversations cut, and left out since no token with a loss is left |
# | n | tokens of each conversation; 0 of one that is left out |
# | n | the line of each, counted from 1 |
# | the rest | token ids; one with a loss as ~id, a negative number |

OVERLONG = ("cut", "refuse")
ROLES = {"human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "system": "system"}
"""ShareGPT's names of those who speak, and the usual ones."""
_LINES_AT_ONCE = 2048
_IN_MEMORY_BELOW_BYTES = 1 << 20
_FORMAT = 1
_SHOWN = 60


@dataclass(frozen=True)
class Conversation:
    """What a line holds: messages, and what else the template is given."""

    messages: list[dict[str, Any]]
    more: dict[str, Any]


def parse_line(line: bytes) -> Conversation:
    """Return the conversation in a line.

    Raises:
        ValueError: what must hold, what was got, and what to do.
    """
    try:
        content = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"a line must be a JSON object in UTF-8, got {_shown(line)}: {error}. Correct it") from None
    if not isinstance(content, dict) or not ("messages" in content or "conversations" in content):
        got = f"one with {', '.join(map(repr, content)) or 'nothing'}" if isinstance(content, dict) else _shown(line)
        raise ValueError(f'a line must be an object with "messages" (or "conversations"), got {got}. Rename the field')
    messages = _messages(content)
    if not any(message["role"] == ASSISTANT for message in messages):
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f'a conversation must have a message of the role "assistant", got {roles}. Take the line out')
    more = content.get("chat_template_kwargs") or {}
    if not isinstance(more, dict):
        raise ValueError(f'"chat_template_kwargs" must be an object, got {_shown(more)}. Correct it')
    return Conversation(messages, {**more, **({"tools": content["tools"]} if content.get("tools") else {})})


def _messages(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    name = "messages" if "messages" in content else "conversations"
    listed = content[name]
    if not isinstance(listed, list) or not listed:
        raise ValueError(f'"{name}" must be a list of messages, one at least, got {_shown(listed)}. Correct it')
    messages = [_message(one, place) for place, one in enumerate(listed, 1)]
    if name == "conversations" and isinstance(content.get("system"), str):
        messages.insert(0, {"role": "system", "content": content["system"]})
    return messages


def _message(one: Any, place: int) -> dict[str, Any]:
    if isinstance(one, dict) and "from" in one and "role" not in one:
        role = ROLES.get(one["from"]) if isinstance(one["from"], str) else None
        if role is None or not isinstance(one.get("value"), str):
            raise ValueError(
                f'message {place} must be {{"from": {" or ".join(ROLES)}, "value": a text}}, got {_shown(one)}. '
                'Correct it, or write it as {"role": ..., "content": ...}'
            )
        return {"role": role, "content": one["value"]}
    is_text = isinstance(one, dict) and isinstance(one.get("content"), str)
    calls = isinstance(one, dict) and one.get("content") is None and bool(one.get("tool_calls"))
    if not isinstance(one, dict) or not isinstance(one.get("role"), str) or not (is_text or calls):
        raise ValueError(
            f'message {place} must be {{"role": a text, "content": a text}}, got {_shown(one)}. Correct it'
        )
    return one


def _shown(value: Any) -> str:
    is_line = isinstance(value, bytes)
    text = value.decode("utf-8", "replace").strip() if is_line else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class ConversationFile:
    """The conversations of a JSONL file as documents; stands in for an ``IndexedDataset``.

    ``sizes`` int32 is the number of tokens of each, 0 of one without a loss. What is read are signed ids: ``~id``,
    which is negative, where the token has a loss.

    Args:
        capacity: tokens of a sample; a longer conversation is cut from its end, or refused.
        overlong: a name of ``OVERLONG``.
        cache: where the tokens are kept for the processes of this host, and for later runs; None: in memory.

    Raises:
        DataError: a line that is no conversation, that the template refuses, or that is too long; no conversation.
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
        self._starts, self._digest = self._look_through()
        parts = self._parts(cache)
        counts = [self._count_in(number) for number in range(len(parts))]
        sizes = [part[2 : 2 + count] for part, count in zip(parts, counts, strict=True)]
        self.sizes = np.concatenate(sizes) if sizes else np.zeros(0, np.int32)
        self._lines = [part[2 + count : 2 + 2 * count] for part, count in zip(parts, counts, strict=True)]
        self._tokens = [part[2 + 2 * count :] for part, count in zip(parts, counts, strict=True)]
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes, dtype=np.int64)])
        self.num_documents, self.num_tokens = len(self.sizes), int(self._bounds[-1])
        self.num_cut, self.num_left_out = (sum(int(part[place]) for part in parts) for place in (0, 1))
        self._note_lengths()

    @cached_property
    def fingerprint(self) -> str:
        """A short text that changes with the file and the template."""
        return hashlib.sha256(f"{self._digest}:{self.template.key}".encode()).hexdigest()[:16]

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

    def _look_through(self) -> tuple[np.ndarray, str]:
        """Return int64[n, 2], line number and first byte of each line that is not blank, and a hash of the file."""
        digest, starts, at = hashlib.sha256(), list[tuple[int, int]](), 0
        try:
            with open(self.token_path, "rb") as file:
                for number, line in enumerate(file, 1):
                    digest.update(line)
                    if line.strip():
                        starts.append((number, at))
                    at += len(line)
        except OSError as error:
            raise DataError(f"{self.prefix} must be a file of JSON lines that can be read: {error}") from error
        if not starts:
            raise DataError(f"{self.prefix} must hold a conversation on each line, got none. Name another file")
        return np.array(starts, np.int64), digest.hexdigest()

    def _parts(self, cache: IndexCache | None) -> list[np.ndarray]:
        count = -(-len(self._starts) // _LINES_AT_ONCE)
        if cache is None or self.token_path.stat().st_size < _IN_MEMORY_BELOW_BYTES:
            return [np.concatenate(list(self._encoded(number))) for number in range(count)]
        key = (
            _FORMAT,
            _LINES_AT_ONCE,
            self.fingerprint,
            self.template.tokenizer.identity,
            self.capacity,
            self.overlong,
        )
        name = f"sft-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
        return cache.arrays(name, count, self._encoded, outlives_boot=True)

    def _count_in(self, part: int) -> int:
        return min(_LINES_AT_ONCE, len(self._starts) - part * _LINES_AT_ONCE)

    def _encoded(self, part: int) -> Iterator[np.ndarray]:
        """Yield the arrays of a part, as the table at the top of this file has them."""
        if part == 1:
            log.info(f"{self.prefix}: encoding {len(self._starts)} conversations")
        lines = self._starts[part * _LINES_AT_ONCE : (part + 1) * _LINES_AT_ONCE]
        rows, counts = list[np.ndarray](), np.zeros(2, np.int32)
        with open(self.token_path, "rb") as file:
            for number, start in lines.tolist():
                file.seek(start)
                row = self._row(file.readline(), number)
                counts[0] += len(row) > self.capacity
                row = row[: self.capacity]
                has_loss = bool((row[1:] < 0).any())  # a first token is never predicted
                counts[1] += not has_loss
                rows.append(row if has_loss else row[:0])
        yield counts
        yield np.array([len(row) for row in rows], np.int32)
        yield lines[:, 0].astype(np.int32)
        yield np.concatenate(rows)

    def _row(self, line: bytes, number: int) -> np.ndarray:
        """Return the signed ids of a line.

        Raises:
            DataError: naming the line.
        """
        try:
            conversation = parse_line(line)
            encoded = self.template.encode(conversation.messages, **conversation.more)
        except ValueError as error:  # DataError too
            raise DataError(f"{self.prefix}:{number}: {error}") from error
        ids = np.array(encoded.ids, np.int32)
        if self.overlong == "refuse" and len(ids) > self.capacity:
            raise DataError(
                f"{self.prefix}:{number}: a conversation must have at most --seq-length + 1 = {self.capacity} tokens, "
                f"got {len(ids)}. Raise --seq-length, shorten it, or cut such ones with --sft-overlong cut"
            )
        return np.where(np.array(encoded.is_said, bool), ~ids, ids)

    def _note_lengths(self) -> None:
        if self.num_cut or self.num_left_out:
            log.warn_once(
                f"{self.prefix}: of {self.num_documents} conversations {self.num_cut} are longer than --seq-length + 1 "
                f"= {self.capacity} tokens and are cut from the end; {self.num_left_out} have no token left that the "
                "assistant says and are left out. --sft-overlong refuse names the first instead"
            )


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
        paths: JSONL files where token files are named else (``DataConfig.corpora``).
        template: the chat template with the tokenizer of the run.
        overlong: as ``ConversationFile``.

    Raises:
        DataError: as ``ConversationFile``; paths, weights and splits that cannot be used.
    """

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

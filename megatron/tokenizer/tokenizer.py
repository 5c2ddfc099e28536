"""Tokenizer: the base class of all tokenizers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megatron.errors import DataError
from megatron.tokenizer import identity as tokenizer_identity
from megatron.tokenizer import probe as tokenizer_probe
from megatron.tokenizer.control_tokens import (
    BY_NAME,
    EOD_NAMES,
    FORMER_EOD_NAMES,
    NEW_NAMES,
    NOT_CHAT_EOD_NAMES,
    PAD_NAMES,
    SENTINEL_NAMES,
    UNK_NAMES,
    Spellings,
    all_names,
)
from megatron.tokenizer.sibling_files import SiblingFiles, read_siblings

Arrays = tuple[np.ndarray, np.ndarray]
"""(concatenated tokens of several texts, int32; number of tokens per text, int64)."""


class Tokenizer(ABC):
    """Conversion between text and token ids.

    The spelling of a control token in a text is encoded as ordinary text, so that a document cannot end itself or be
    mistaken for padding or a span.

    Args:
        paths: files that the vocabulary is read from.
        settings: other settings that determine the ids; empty if the files are sufficient.

    Attributes:
        num_rows: rows in the model's embedding if fewer than the ids; None: every id has a row.
    """

    def __init__(self, paths: Sequence[Path], settings: str = "") -> None:
        self.paths = list(paths)
        self.settings = settings
        self.num_rows: int | None = None
        self._eod_token: str | None = None
        self._spellings = Spellings(self._names_to_escape(self.control_tokens))

    def __setstate__(self, eod_token: str) -> None:
        """Restore a pickled tokenizer's end-of-document token, as its sibling files may be on another machine."""
        self.use_eod(eod_token)

    def use_eod(self, name: str) -> None:
        """Make ``name`` the end-of-document token (--eod-token). Its spelling in a text is encoded as ordinary text.

        Raises:
            DataError: the vocabulary does not have this token.
        """
        if name == BY_NAME:
            if self.former_eod_name is None:
                return
            name = self.former_eod_name
        if self.token_to_id(name) is None:
            raise DataError(
                f"--eod-token {name} is not in the vocabulary of {', '.join(map(str, self.paths))}. Name one of its "
                "tokens, or remove the flag"
            )
        is_changed = name != self.eod_name
        self._eod_token = name
        if not is_changed:
            return
        for property_name in ("eod_name", "eod_id", "control_tokens"):
            self.__dict__.pop(property_name, None)
        self._spellings = Spellings(self._names_to_escape(self.control_tokens))

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The largest id plus one."""

    @cached_property
    def text_vocab_size(self) -> int:
        """The largest id of plain text, end of document or padding, plus one; special tokens may have larger ids."""
        return self.vocab_size

    def _largest_used_id(self) -> int:
        used = (self.eod_id if self.has_eod else None, self.pad_id, self.unk_id)
        return max((token for token in used if token is not None), default=-1)

    @abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """Look up a token's id by name; None if the vocabulary does not have it."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Decode ``ids`` to text; control tokens appear by name or are omitted, depending on the library."""

    @abstractmethod
    def _encode_arrays(self, texts: list[str]) -> Arrays:
        """Encode ``texts``, which do not spell any control token that the library would recognize."""

    @property
    def spelling(self) -> str:
        """The convention by which ``piece`` marks word starts, a key in ``word_starts._RULES``; "" if none."""
        return ""

    def piece(self, token: int) -> str | None:
        """Return a token's spelling in the vocabulary; None if the vocabulary does not have this id."""
        return None

    def _encode_continued(self, texts: list[str]) -> Arrays:
        """Like ``_encode_arrays``, for chunks that continue an earlier chunk of the same text."""
        return self._encode_arrays(texts)

    def encode(self, text: str) -> list[int]:
        """Encode ``text`` without added control tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode ``texts``; one list of token ids per text."""
        return as_lists(self.encode_arrays(texts))

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        """Encode ``texts`` to concatenated tokens (int32), and the token count per text (int64)."""
        texts = list(texts)
        spelled = [idx for idx, text in enumerate(texts) if self._spellings.is_in(text)] if self._spellings else []
        if not spelled:
            return self._encode_arrays(texts)
        split_texts = [self._spellings.split(texts[idx]) for idx in spelled]
        for idx, segments in zip(spelled, split_texts, strict=True):
            texts[idx] = segments[0]
        tokens, lengths = self._encode_arrays(texts)
        added_tokens, added_lengths = self._encode_continued(
            [segment for segments in split_texts for segment in segments[1:]]
        )
        segment_starts = np.cumsum([0, *(len(segments) - 1 for segments in split_texts[:-1])])
        added = np.add.reduceat(added_lengths, segment_starts)
        insert_at = np.cumsum(lengths)[spelled]
        lengths[spelled] += added
        return np.insert(tokens, np.repeat(insert_at, added), added_tokens), lengths

    def encode_chunks(self, chunks: Iterable[str]) -> np.ndarray:
        """Encode one text, given as consecutive chunks, to int32 tokens.

        If the tokenizer adds a space before a text, only the first chunk gets it. Spelled control tokens are escaped in
        each chunk. A spelling that crosses a chunk boundary needs no escape, because the library encodes the chunks
        separately. Only one chunk and the tokens are held in memory.
        """
        encoded = [np.zeros(0, np.int32)]
        for chunk in filter(None, chunks):
            is_first = len(encoded) == 1
            if self._spellings.is_in(chunk):
                encoded.append(self._encode_spelled(chunk, is_first))
            else:
                encoded.append((self._encode_arrays if is_first else self._encode_continued)([chunk])[0])
        return np.concatenate(encoded)

    def _encode_spelled(self, text: str, is_first: bool) -> np.ndarray:
        """Encode a text, or a chunk that continues a text, in which control tokens are spelled."""
        first, *others = self._spellings.split(text)
        tokens = (self._encode_arrays if is_first else self._encode_continued)([first])[0]
        return np.concatenate([tokens, self._encode_continued(others)[0]])

    def _names_to_escape(self, control: Mapping[str, int]) -> list[str]:
        """Find names in ``control`` that the library would encode as control tokens if a text spells them."""
        names = [name for name in control if len(name) > 1]
        if not names:
            return []
        alone = as_lists(self._encode_arrays(names))
        within = as_lists(self._encode_arrays([f"a{name}a" for name in names]))
        start = as_lists(self._encode_arrays([name[:1] for name in names]))
        end = as_lists(self._encode_continued([name[1:] for name in names]))
        return [
            name
            for idx, name in enumerate(names)
            if control[name] in (*alone[idx], *within[idx])
            and control[name] not in (*start[idx], *end[idx])  # <unk> may be the id of unknown characters
        ]

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Name -> id for all control tokens, such as end of document, padding, unknown, spans and masks."""
        eod = [self.eod_name] if self.eod_name is not None else []
        names = [name for name in (*all_names(), *self._declared_control_names()) if name not in self.plain_names]
        return self._ids_by_name([*names, *eod])

    def _ids_by_name(self, names: Iterable[str]) -> dict[str, int]:
        ids = {name: self.token_to_id(name) for name in names}
        return {name: token for name, token in ids.items() if token is not None}

    def _declared_control_names(self) -> Iterable[str]:
        """Return the names that the tokenizer's files declare as control tokens."""
        return ()

    @cached_property
    def plain_names(self) -> frozenset[str]:
        """Names that the vocabulary declares as ordinary text, such as Gemma's HTML tags <s> and </s>."""
        return frozenset()

    @cached_property
    def siblings(self) -> SiblingFiles:
        """The settings in the files next to the vocabulary."""
        return read_siblings(self.paths)

    @cached_property
    def eod_name(self) -> str | None:
        """The end-of-document token, by name; None if absent.

        It is the first of the following that is in the vocabulary:

        1. the token set by ``use_eod`` (--eod-token, the sidecar of a token file, a resumed run);
        2. if the vocabulary's folder has no chat template: its eos_token;
        3. if it has a chat template, whose eos_token often ends a turn (``<|im_end|>``): an end-of-document token among
           the folder's special tokens, preferably its eos_token;
        4. the first of ``EOD_NAMES``; tokens that the vocabulary declares as ordinary text come last.
        """
        if self._eod_token is not None:
            return self._eod_token
        return next((name for name in self._eod_candidates() if self.token_to_id(name) is not None), None)

    def _eod_candidates(self) -> Iterator[str]:
        eos = self.siblings.named.get("eos_token")
        if self.siblings.has_chat_template:
            special = {*self.siblings.special, *self._declared_control_names()}
            end_of_text_names = [name for name in EOD_NAMES if name in special and name not in NOT_CHAT_EOD_NAMES]
            yield from sorted(end_of_text_names, key=lambda name: name != eos)
        elif eos is not None:
            yield eos
        yield from (name for name in EOD_NAMES if name not in self.plain_names)
        yield from EOD_NAMES

    @property
    def former_eod_name(self) -> str | None:
        """The end-of-document token that versions up to 8c23b9e6 used, by name; None if absent."""
        return next((name for name in FORMER_EOD_NAMES if self.token_to_id(name) is not None), None)

    @property
    def has_given_eod(self) -> bool:
        """True if ``use_eod`` chose the end-of-document token."""
        return self._eod_token is not None

    @property
    def has_eod(self) -> bool:
        """True if the vocabulary has an end-of-document token."""
        return self.eod_name is not None

    @cached_property
    def eod_id(self) -> int:
        """End-of-document token id.

        Raises:
            DataError: the vocabulary has none.
        """
        token = self.token_to_id(self.eod_name) if self.eod_name is not None else None
        if token is None:
            raise DataError(
                f"the vocabulary must have an end-of-document token, one of {', '.join(EOD_NAMES)}; "
                f"{', '.join(map(str, self.paths))} has none. Name one of its tokens with --eod-token, use another "
                "tokenizer (tools/train_tokenizer.py adds one), or disable its use (preprocessing: "
                "--no-append-eod)."
            )
        return token

    def name_of(self, token: int) -> str | None:
        """Return a token's name; None if the vocabulary has no name for it."""
        return next((name for name, id_ in self.control_tokens.items() if id_ == token), self.piece(token))

    @cached_property
    def opening_ids(self) -> tuple[int, ...]:
        """The ids that transformers inserts before a prompt, such as ``<s>``; may be empty."""
        name = self.siblings.named.get("bos_token")
        token = None if name is None or not self.siblings.add_bos_token else self.token_to_id(name)
        return () if token is None else (token,)

    @cached_property
    def pad_id(self) -> int | None:
        """Padding token id; None if absent."""
        return self._first_of(PAD_NAMES)

    @cached_property
    def unk_id(self) -> int | None:
        """Unknown token id; None if absent."""
        return self._first_of(UNK_NAMES)

    def _first_of(self, names: Sequence[str]) -> int | None:
        ids = (self.token_to_id(name) for name in names)
        return next((token for token in ids if token is not None), None)

    @cached_property
    def sentinel_ids(self) -> tuple[int, ...]:
        """The ids that represent masked spans, in span order; may be empty."""
        for name in SENTINEL_NAMES:
            ids: list[int] = []
            while (token := self.token_to_id(name.format(len(ids)))) is not None:
                ids.append(token)
            if ids:
                return tuple(ids)
        return ()

    @property
    def spelled_names(self) -> tuple[str, ...]:
        """Control tokens whose spellings in a text are escaped, by name."""
        return self._spellings.names

    @cached_property
    def identity(self) -> str:
        """The tokenizer's identity in token files and checkpoints; see ``megatron/tokenizer/identity.py``."""
        return tokenizer_identity.join(tokenizer_identity.digest(self._identity_values()), self._files_digest())

    @property
    def version_text(self) -> str:
        """Library, its version and the pre-tokenizer, for messages about different ids."""
        return type(self).__name__

    @cached_property
    def probe(self) -> dict[str, Any] | None:
        """Ids of the probe texts, which token files and checkpoints store; None if the text cannot be encoded."""
        return tokenizer_probe.take(self)

    @abstractmethod
    def _identity_values(self) -> Iterable[Any]:
        """Return the JSON values that determine a text's ids, and no others."""

    def _former_control_names(self) -> list[str]:
        """Return all names that versions up to 8c23b9e6 looked up as control tokens; the vocabulary may lack some."""
        return [*(name for name in all_names() if name not in NEW_NAMES), *self._declared_control_names()]

    def _files_digest(self) -> str:
        """Return the identity as in versions up to 8c23b9e6: SHA-256 over the files and the escaped names."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        escaped = Spellings(self._names_to_escape(self._ids_by_name(self._former_control_names()))).names
        beyond_eod = [name for name in escaped if name != self.former_eod_name]
        for text in (self.settings, *beyond_eod):
            digest.update(text.encode())
        return digest.hexdigest()


def as_arrays(encoded: Sequence[Sequence[int]]) -> Arrays:
    """Convert lists of token ids to arrays."""
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return np.fromiter(chain.from_iterable(encoded), np.int32, int(lengths.sum())), lengths


def as_lists(arrays: Arrays) -> list[list[int]]:
    """Convert arrays to one list of token ids per text."""
    tokens, lengths = arrays
    stops = np.cumsum(lengths).tolist()
    ids = tokens.tolist()
    return [ids[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]

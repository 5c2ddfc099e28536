"""Tokenizer: the interface of all tokenizers."""

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
from megatron.tokenizer.control_tokens import (
    BY_NAME,
    EOD_NAMES,
    FORMER_EOD_NAMES,
    NEW_NAMES,
    NOT_OF_CHATS,
    PAD_NAMES,
    SENTINEL_NAMES,
    UNK_NAMES,
    Spellings,
    all_names,
)
from megatron.tokenizer.sibling_files import SiblingFiles, read_siblings

Arrays = tuple[np.ndarray, np.ndarray]
"""int32 tokens of several texts one after the other, and int64 number of tokens of each."""


class Tokenizer(ABC):
    """Text to token ids and back.

    Text that spells a control token is ordinary text: no document can end itself, or be taken for padding or a span.

    Args:
        paths: the files that the vocabulary is read from.
        settings: what else decides the ids; empty where the files say it all.

    Attributes:
        num_rows: rows of the model's vocabulary where they are fewer than the ids; None: every id has a row.
    """

    def __init__(self, paths: Sequence[Path], settings: str = "") -> None:
        self.paths = list(paths)
        self.settings = settings
        self.num_rows: int | None = None
        self._eod_token: str | None = None
        self._spellings = Spellings(self._found_in_text(self.control_tokens))

    def __setstate__(self, eod_token: str) -> None:
        """Restore the end-of-document token of a pickled tokenizer, whose sibling files may be on another machine."""
        self.use_eod(eod_token)

    def use_eod(self, name: str) -> None:
        """Make ``name`` the end-of-document token, as --eod-token does. Text that spells it is ordinary text.

        Raises:
            DataError: If the vocabulary has no such token.
        """
        if name == BY_NAME:
            if self.former_eod_name is None:
                return
            name = self.former_eod_name
        if self.token_to_id(name) is None:
            raise DataError(
                f"--eod-token {name} is not in the vocabulary of {', '.join(map(str, self.paths))}. Name one of its "
                "tokens, or leave the flag out"
            )
        is_changed = name != self.eod_name
        self._eod_token = name
        if not is_changed:
            return
        for cached in ("eod_name", "eod_id", "control_tokens"):
            self.__dict__.pop(cached, None)
        self._spellings = Spellings(self._found_in_text(self.control_tokens))

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @cached_property
    def text_vocab_size(self) -> int:
        """One more than the largest id that plain text, its end or padding may have; special tokens may lie above."""
        return self.vocab_size

    def _largest_used_id(self) -> int:
        used = (self.eod_id if self.has_eod else None, self.pad_id, self.unk_id)
        return max((token for token in used if token is not None), default=-1)

    @abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary by its name."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; control tokens appear by their name or not at all, as the library does it."""

    @abstractmethod
    def _encode_arrays(self, texts: list[str]) -> Arrays:
        """Return the tokens of ``texts``, of which none spells a control token that the kind would find."""

    @property
    def spelling(self) -> str:
        """How ``piece`` tells where words begin: a name of the table in ``word_starts``, "" where it does not."""
        return ""

    def piece(self, token: int) -> str | None:
        """Return how the vocabulary spells a token, None where it has no such id."""
        return None

    def _encode_continued(self, texts: list[str]) -> Arrays:
        """As ``_encode_arrays``, for parts that go on where another part of the same text stopped."""
        return self._encode_arrays(texts)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, no control token added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each of ``texts``."""
        return as_lists(self.encode_arrays(texts))

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        """Return the int32 tokens of all ``texts`` one after the other, and the int64 number of tokens of each."""
        texts = list(texts)
        spelled = [place for place, text in enumerate(texts) if self._spellings.is_in(text)] if self._spellings else []
        if not spelled:
            return self._encode_arrays(texts)
        cut = [self._spellings.cut(texts[place]) for place in spelled]
        for place, parts in zip(spelled, cut, strict=True):
            texts[place] = parts[0]
        tokens, sizes = self._encode_arrays(texts)
        more, more_sizes = self._encode_continued([part for parts in cut for part in parts[1:]])
        first = np.cumsum([0, *(len(parts) - 1 for parts in cut[:-1])])
        added = np.add.reduceat(more_sizes, first)
        behind = np.cumsum(sizes)[spelled]
        sizes[spelled] += added
        return np.insert(tokens, np.repeat(behind, added), more), sizes

    def encode_pieces(self, pieces: Iterable[str]) -> np.ndarray:
        """Return the int32 tokens of one text that is given in consecutive pieces.

        Only the first piece gets the space that a kind puts in front of a text. Text that spells a control token is
        escaped in each piece; where a cut parts it, nothing spells it. Memory is that of a piece and of the tokens.
        """
        found = [np.zeros(0, np.int32)]
        for piece in filter(None, pieces):
            is_first = len(found) == 1
            if self._spellings.is_in(piece):
                found.append(self._encode_spelled(piece, is_first))
            else:
                found.append((self._encode_arrays if is_first else self._encode_continued)([piece])[0])
        return np.concatenate(found)

    def _encode_spelled(self, text: str, is_first: bool) -> np.ndarray:
        """Return the tokens of a text that spells control tokens, or of a piece that goes on."""
        first, *others = self._spellings.cut(text)
        tokens = (self._encode_arrays if is_first else self._encode_continued)([first])[0]
        return np.concatenate([tokens, self._encode_continued(others)[0]])

    def _found_in_text(self, control: Mapping[str, int]) -> list[str]:
        """Return the names in ``control`` whose ids the library would give to text that spells them."""
        names = [name for name in control if len(name) > 1]
        if not names:
            return []
        alone = as_lists(self._encode_arrays(names))
        within = as_lists(self._encode_arrays([f"a{name}a" for name in names]))
        start = as_lists(self._encode_arrays([name[:1] for name in names]))
        end = as_lists(self._encode_continued([name[1:] for name in names]))
        return [
            name
            for place, name in enumerate(names)
            if control[name] in (*alone[place], *within[place])
            and control[name] not in (*start[place], *end[place])  # <unk>, for characters of its name
        ]

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """The ids of all control tokens by name: end of document, padding, unknown, spans, masks and the like."""
        eod = [self.eod_name] if self.eod_name is not None else []
        names = [name for name in (*all_names(), *self._declared_control_names()) if name not in self.plain_names]
        return self._ids_by_name([*names, *eod])

    def _ids_by_name(self, names: Iterable[str]) -> dict[str, int]:
        found = {name: self.token_to_id(name) for name in names}
        return {name: token for name, token in found.items() if token is not None}

    def _declared_control_names(self) -> Iterable[str]:
        """Return the names that the files themselves declare to be control tokens."""
        return ()

    @cached_property
    def plain_names(self) -> frozenset[str]:
        """Names of tokens that the vocabulary adds as ordinary text, such as Gemma's HTML tags <s> and </s>."""
        return frozenset()

    @cached_property
    def siblings(self) -> SiblingFiles:
        """What the files next to the vocabulary say."""
        return read_siblings(self.paths)

    @cached_property
    def eod_name(self) -> str | None:
        """The name of the end-of-document token, None if there is none.

        The first of these that is in the vocabulary:

        1. the token of ``use_eod`` (--eod-token, a token file's sidecar, a resumed run);
        2. the eos_token of the vocabulary's folder, if the folder has no chat template;
        3. with a chat template, whose eos_token often ends a turn (``<|im_end|>``): the end-of-text token among the
           folder's special tokens, its eos_token first;
        4. the first of ``EOD_NAMES``, tokens that the vocabulary adds as ordinary text last.
        """
        if self._eod_token is not None:
            return self._eod_token
        return next((name for name in self._eod_candidates() if self.token_to_id(name) is not None), None)

    def _eod_candidates(self) -> Iterator[str]:
        eos = self.siblings.named.get("eos_token")
        if self.siblings.has_chat_template:
            special = {*self.siblings.special, *self._declared_control_names()}
            of_texts = [name for name in EOD_NAMES if name in special and name not in NOT_OF_CHATS]
            yield from sorted(of_texts, key=lambda name: name != eos)
        elif eos is not None:
            yield eos
        yield from (name for name in EOD_NAMES if name not in self.plain_names)
        yield from EOD_NAMES

    @property
    def former_eod_name(self) -> str | None:
        """The name of the token that versions up to 8c23b9e6 ended documents with, None if there is none."""
        return next((name for name in FORMER_EOD_NAMES if self.token_to_id(name) is not None), None)

    @property
    def has_given_eod(self) -> bool:
        """True if ``use_eod`` chose the end-of-document token."""
        return self._eod_token is not None

    @property
    def has_eod(self) -> bool:
        """Whether the vocabulary has an end-of-document token."""
        return self.eod_name is not None

    @cached_property
    def eod_id(self) -> int:
        """The id of the end-of-document token.

        Raises:
            DataError: the vocabulary has none.
        """
        token = self.token_to_id(self.eod_name) if self.eod_name is not None else None
        if token is None:
            raise DataError(
                f"the vocabulary must have an end-of-document token, one of {', '.join(EOD_NAMES)}; "
                f"{', '.join(map(str, self.paths))} has none. Name one of its tokens with --eod-token, take another "
                "tokenizer (tools/train_tokenizer.py adds one), or leave out what needs it (preprocessing: "
                "--no-append-eod)."
            )
        return token

    def name_of(self, token: int) -> str | None:
        """Return the name of a token, None if the vocabulary has no name for it."""
        return next((name for name, number in self.control_tokens.items() if number == token), self.piece(token))

    @cached_property
    def opening_ids(self) -> tuple[int, ...]:
        """The ids that transformers puts in front of a prompt, such as ``<s>``; empty if there are none."""
        name = self.siblings.named.get("bos_token")
        token = None if name is None or not self.siblings.add_bos_token else self.token_to_id(name)
        return () if token is None else (token,)

    @cached_property
    def pad_id(self) -> int | None:
        """The id of the padding token, None if there is none."""
        return self._first_of(PAD_NAMES)

    @cached_property
    def unk_id(self) -> int | None:
        """The id that stands for what the vocabulary does not have, None if there is none."""
        return self._first_of(UNK_NAMES)

    def _first_of(self, names: Sequence[str]) -> int | None:
        ids = (self.token_to_id(name) for name in names)
        return next((token for token in ids if token is not None), None)

    @cached_property
    def sentinel_ids(self) -> tuple[int, ...]:
        """The ids that stand for spans cut out of a text, that of the first span first; empty if there are none."""
        for name in SENTINEL_NAMES:
            found: list[int] = []
            while (token := self.token_to_id(name.format(len(found)))) is not None:
                found.append(token)
            if found:
                return tuple(found)
        return ()

    @property
    def spelled_names(self) -> tuple[str, ...]:
        """The names of the control tokens that are escaped where a text spells them."""
        return self._spellings.names

    @cached_property
    def identity(self) -> str:
        """What token files and checkpoints know the tokenizer by: see ``megatron/tokenizer/identity.py``."""
        return tokenizer_identity.join(tokenizer_identity.digest(self._facts()), self._files_digest())

    @abstractmethod
    def _facts(self) -> Iterable[Any]:
        """Return JSON values that decide the ids of a text, and nothing else."""

    def _former_control_names(self) -> list[str]:
        """Return the names that versions up to 8c23b9e6 looked for, whether the vocabulary has them or not."""
        return [*(name for name in all_names() if name not in NEW_NAMES), *self._declared_control_names()]

    def _files_digest(self) -> str:
        """Return the identity of versions up to 8c23b9e6: SHA-256 over the files and the names that are escaped."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        spelled = Spellings(self._found_in_text(self._ids_by_name(self._former_control_names()))).names
        beyond_eod = [name for name in spelled if name != self.former_eod_name]
        for part in (self.settings, *beyond_eod):
            digest.update(part.encode())
        return digest.hexdigest()


def as_arrays(encoded: Sequence[Sequence[int]]) -> Arrays:
    """Return lists of token ids as arrays."""
    sizes = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return np.fromiter(chain.from_iterable(encoded), np.int32, int(sizes.sum())), sizes


def as_lists(arrays: Arrays) -> list[list[int]]:
    """Return the token ids of each text as a list."""
    tokens, sizes = arrays
    stops = np.cumsum(sizes).tolist()
    ids = tokens.tolist()
    return [ids[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]

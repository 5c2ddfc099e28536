"""What every tokenizer of this project can do, and the parts that all kinds share."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np

from megatron.errors import DataError
from megatron.tokenizer.names import EOD_NAMES, PAD_NAMES, SENTINEL_NAMES, UNK_NAMES, all_names
from megatron.tokenizer.spellings import Spellings

Arrays = tuple[np.ndarray, np.ndarray]
"""int32 tokens of several texts one after the other, and int64 number of tokens of each."""


class Tokenizer(ABC):
    """Text to token ids and back.

    Text that spells a control token is ordinary text: no document can end itself, or be taken for padding or a span.

    Args:
        paths: the files that the vocabulary is read from.
        settings: what else decides the ids; empty where the files say it all.
    """

    def __init__(self, paths: Sequence[Path], settings: str = "") -> None:
        self.paths = list(paths)
        self.settings = settings
        self._spellings = Spellings(self._found_in_text())

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id."""

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

    def _found_in_text(self) -> list[str]:
        """Return the names of the control tokens whose ids the kind would give to text that spells them."""
        names = [name for name in self.control_tokens if len(name) > 1]
        if not names:
            return []
        alone = as_lists(self._encode_arrays(names))
        within = as_lists(self._encode_arrays([f"a{name}a" for name in names]))
        start = as_lists(self._encode_arrays([name[:1] for name in names]))
        end = as_lists(self._encode_continued([name[1:] for name in names]))
        return [
            name
            for place, name in enumerate(names)
            if self.control_tokens[name] in (*alone[place], *within[place])
            and self.control_tokens[name] not in (*start[place], *end[place])  # <unk>, for characters of its name
        ]

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """The ids of all control tokens by name: end of document, padding, unknown, spans, masks and the like."""
        found = {name: self.token_to_id(name) for name in (*all_names(), *self._declared_control_names())}
        return {name: token for name, token in found.items() if token is not None}

    def _declared_control_names(self) -> Iterable[str]:
        """Return the names that the files themselves declare to be control tokens."""
        return ()

    @cached_property
    def eod_name(self) -> str | None:
        """The name of the end-of-document token, None if there is none."""
        return next((name for name in EOD_NAMES if self.token_to_id(name) is not None), None)

    @property
    def has_eod(self) -> bool:
        """Whether the vocabulary has an end-of-document token."""
        return self.eod_name is not None

    @property
    def eod_id(self) -> int:
        """The id of the end-of-document token.

        Raises:
            DataError: the vocabulary has none.
        """
        token = self.token_to_id(self.eod_name) if self.eod_name is not None else None
        if token is None:
            raise DataError(
                f"the vocabulary must have an end-of-document token, one of {', '.join(EOD_NAMES)}; "
                f"{', '.join(map(str, self.paths))} has none. Take another tokenizer (tools/train_tokenizer.py adds "
                "one), or leave out what needs it (preprocessing: --no-append-eod)."
            )
        return token

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
        """SHA-256 over the tokenizer's files and all else that decides the ids, in hexadecimal."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        beyond_eod = [name for name in self._spellings.names if name != self.eod_name]
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

"""What every tokenizer of this project can do, and the parts that all kinds share."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np

from megatron.errors import DataError

EOD_NAMES = ("<|endoftext|>", "<eod>", "<|end_of_text|>", "[EOD]", "</s>")
"""Names of the end-of-document token, the first that is in the vocabulary counts."""
PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")
"""Names of the padding token, as above."""
SENTINEL_NAMES = ("<extra_id_{}>", "<s_{}>")
"""Names of the tokens that stand for spans, T5's and CPM's; those of one kind, counted from 0 without a gap."""


class Tokenizer(ABC):
    """Text to token ids and back.

    Text that spells the end-of-document token is ordinary text: no document can end itself.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._must_escape = False
        if self.has_eod:
            self._must_escape = self.eod_id in self._encode_batch([f"a{self.eod_name}a"])[0]

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
    def _encode_batch(self, texts: list[str]) -> list[list[int]]: ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, no control token added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each of ``texts``."""
        if not self._must_escape:
            return self._encode_batch(texts)
        return [self._encode_escaped(text) for text in texts]

    def encode_arrays(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the int32 tokens of all ``texts`` one after the other, and the int64 number of tokens of each."""
        encoded = self.encode_batch(list(texts))
        sizes = np.fromiter(map(len, encoded), np.int64, len(encoded))
        tokens = np.fromiter(chain.from_iterable(encoded), np.int32, int(sizes.sum()))
        return tokens, sizes

    def _encode_escaped(self, text: str) -> list[int]:
        """Cut inside each spelling of the control token, so that the library cannot see it as one."""
        name = self.eod_name
        if name is None or name not in text:
            return self._encode_batch([text])[0]
        parts = text.split(name)
        pieces = [
            (name[1:] if place else "") + part + (name[0] if place < len(parts) - 1 else "")
            for place, part in enumerate(parts)
        ]
        return [token for ids in self._encode_batch(pieces) for token in ids]

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
        ids = (self.token_to_id(name) for name in PAD_NAMES)
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

    @cached_property
    def identity(self) -> str:
        """SHA-256 over the tokenizer's files, in hexadecimal."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

"""Byte-pair encoding by ``gigatoken``, which is many times as fast as ``tokenizers`` for the same JSON text.

Only single-threaded calls are used, so that a process uses one core and can be forked at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import awkward  # noqa: F401 - without it gigatoken returns undocumented lists
import gigatoken
import numpy as np

from megatron.tokenizer.continued_text import without_prefix
from megatron.tokenizer.control_tokens import Spellings
from megatron.tokenizer.huggingface import LibraryTokenizer
from megatron.tokenizer.tokenizer import Arrays

_MAX_BYTES = 32 << 20
"""Bytes of text after which the encoder is recreated; its cache then has at most 120 MB, even if all words differ."""


class GigatokenTokenizer(LibraryTokenizer):
    """A BPE from the ``tokenizers`` library that encodes texts with gigatoken; the library does everything else.

    Args:
        identity: the replaced tokenizer's identity.
        names: control tokens whose spellings the replaced tokenizer escapes. gigatoken also recognizes other spellings.
            The few texts with any of these spellings are therefore encoded by the library. They are split only at
            ``names``, because a split at other spellings would prevent merges.
    """

    def __init__(
        self, description: str, paths: Sequence[Path], settings: str, identity: str, names: Sequence[str]
    ) -> None:
        self._escaped = Spellings(names)
        self._fast = _BoundedEncoder(description)
        self._fast_continued: _BoundedEncoder | None = None
        super().__init__(description, paths, settings)
        self.identity = identity

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.description, self.paths, self.settings, self.identity, self._escaped.names)
        return type(self), arguments, self.eod_name

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        spelled = {idx: text for idx, text in enumerate(texts) if self._spellings.is_in(text)}
        tokens, lengths = self._encode_arrays(["" if idx in spelled else text for idx, text in enumerate(texts)])
        if not spelled:
            return tokens, lengths
        indices, spelled_tokens = list(spelled), [self._encode_spelled(text, True) for text in spelled.values()]
        added = np.array(list(map(len, spelled_tokens)))
        insert_at = np.cumsum(lengths)[indices]
        lengths[indices] += added
        return np.insert(tokens, np.repeat(insert_at, added), np.concatenate(spelled_tokens)), lengths

    def _encode_spelled(self, text: str, is_first: bool) -> np.ndarray:
        """Encode a text that spells control tokens with the library instead of gigatoken."""
        first, *others = self._escaped.split(text)
        encode = super()._encode_arrays if is_first else super()._encode_continued
        return np.concatenate([encode([first])[0], super()._encode_continued(others)[0]])

    def _encode_arrays(self, texts: list[str]) -> Arrays:
        return self._without_hidden(self._library, texts, self._fast.encode(texts))

    def _encode_continued(self, texts: list[str]) -> Arrays:
        if self._splits_words:
            return super()._encode_continued(texts)
        if self._fast_continued is None:
            self._fast_continued = _BoundedEncoder(without_prefix(self.description))
        return self._without_hidden(self._library, texts, self._fast_continued.encode(texts))


def gigatoken_version_of(tokenizer: LibraryTokenizer) -> GigatokenTokenizer:
    """Build an equal tokenizer that encodes with gigatoken."""
    fast = GigatokenTokenizer(
        tokenizer.description, tokenizer.paths, tokenizer.settings, tokenizer.identity, tokenizer.spelled_names
    )
    if tokenizer.eod_name is not None:
        fast.use_eod(tokenizer.eod_name)
    return fast


class _BoundedEncoder:
    """gigatoken's tokenizer for a JSON text, recreated periodically because its word cache is unbounded."""

    def __init__(self, description: str) -> None:
        self._description = description
        self._num_bytes = 0
        self._fast = gigatoken.Tokenizer.from_json(description)

    def encode(self, texts: list[str]) -> Arrays:
        data = [text.encode() for text in texts]
        self._num_bytes += sum(map(len, data))
        if self._num_bytes > _MAX_BYTES:
            self._fast = gigatoken.Tokenizer.from_json(self._description)
            self._num_bytes = 0
        return _encode(self._fast, data)


def _encode(fast: gigatoken.Tokenizer, texts: list[bytes]) -> Arrays:
    if not texts:
        return np.zeros(0, np.int32), np.zeros(0, np.int64)
    rows = fast.encode_batch(texts, parallel=False).layout
    stops = np.asarray(rows.offsets.data)
    return np.asarray(rows.content.data)[stops[0] : stops[-1]].astype(np.int32), np.diff(stops)

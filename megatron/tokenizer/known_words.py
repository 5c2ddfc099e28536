"""Byte-level BPE with a cache of encoded words.

GPT-2's pattern never joins what stands before a space with the space. So a text may be cut before each space that a
word follows, and a word with its space has the same tokens wherever it stands: they are looked up, the library sees
new words only. Text with few spaces, as Chinese, has too many different words for that and goes to the library as it
is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from itertools import chain

import numpy as np

from megatron.tokenizer.tokenizer import Arrays

SPACE = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
_WORD = re.compile(f" ?[^{SPACE}]+|[{SPACE}]+(?![^{SPACE}])|[{SPACE}]+")
_LONGEST_MEAN = 12
_CACHE_CHARACTERS = 1 << 22
ENTRY_CHARACTERS = 16
"""What an entry of a memory of words counts besides its own characters: some 200 bytes are spent on each."""


def are_independent(description: str) -> bool:
    """Whether words may be encoded one by one: BPE over bytes with GPT-2's pattern and nothing besides."""
    fields = json.loads(description)
    before = fields.get("pre_tokenizer") or {}
    return (
        fields["model"].get("type") == "BPE"
        and not fields["model"].get("dropout")
        and fields.get("normalizer") is None
        and before.get("type") == "ByteLevel"
        and not before.get("add_prefix_space")
        and before.get("use_regex", True)
        and all(token["special"] for token in fields.get("added_tokens") or [])
    )


class KnownWords:
    """Encodes texts by their words.

    Args:
        encode: the library's way, for new words and for texts with few spaces.
    """

    def __init__(self, encode: Callable[[list[str]], Arrays]) -> None:
        self._encode = encode
        self._tokens: dict[str, bytes] = {}
        self._num_characters = 0

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        """Return the int32 tokens of all ``texts``, and the number of tokens of each."""
        cut = [_WORD.findall(text) if _has_words(text) else [text] for text in texts]
        self._learn(set(chain.from_iterable(cut)).difference(self._tokens))
        encoded = [b"".join(map(self._tokens.__getitem__, words)) for words in cut]
        sizes = np.fromiter(map(len, encoded), np.int64, len(encoded)) // 4
        self._forget({words[0] for words in cut if len(words) == 1})
        return np.frombuffer(bytearray().join(encoded), np.int32), sizes

    def _learn(self, new: set[str]) -> None:
        words = list(new)
        tokens, sizes = self._encode(words)
        stops = np.cumsum(sizes) * 4
        data = tokens.tobytes()
        for word, start, stop in zip(words, [0, *stops.tolist()], stops.tolist(), strict=False):
            self._tokens[word] = data[start:stop]
        self._num_characters += _size(words)

    def _forget(self, whole_texts: set[str]) -> None:
        for text in whole_texts:
            del self._tokens[text]
        self._num_characters -= _size(whole_texts)
        if self._num_characters > _CACHE_CHARACTERS:
            self._tokens.clear()
            self._num_characters = 0


def _size(words: Collection[str]) -> int:
    return sum(map(len, words)) + ENTRY_CHARACTERS * len(words)


def _has_words(text: str) -> bool:
    return text.count(" ") * _LONGEST_MEAN >= len(text)

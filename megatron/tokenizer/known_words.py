"""Byte-level BPE with a cache of encoded words.

GPT-2's pattern never merges a space with the text before it. A text can therefore be split before each space that
precedes a word, and a word with its space has the same tokens at any position. The tokens of words are cached, and the
library only encodes new words. Text with few spaces, such as Chinese, has too many distinct words for a cache and is
encoded by the library as a whole.
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
_MAX_MEAN_WORD_CHARS = 12
_CACHE_CHARACTERS = 1 << 22
ENTRY_CHARACTERS = 16
"""Size of a cache entry in addition to its word, in characters; accounts for about 200 bytes of overhead."""


def are_independent(description: str) -> bool:
    """Return True if words can be encoded one by one: byte-level BPE with only GPT-2's pattern."""
    fields = json.loads(description)
    pre_tokenizer = fields.get("pre_tokenizer") or {}
    return (
        fields["model"].get("type") == "BPE"
        and not fields["model"].get("dropout")
        and fields.get("normalizer") is None
        and pre_tokenizer.get("type") == "ByteLevel"
        and not pre_tokenizer.get("add_prefix_space")
        and pre_tokenizer.get("use_regex", True)
        and all(token["special"] for token in fields.get("added_tokens") or [])
    )


class KnownWords:
    """Encodes texts with a token cache for words.

    Args:
        encode: encoding by the library, for new words and for texts with few spaces.
    """

    def __init__(self, encode: Callable[[list[str]], Arrays]) -> None:
        self._encode = encode
        self._tokens: dict[str, bytes] = {}
        self._num_characters = 0

    def encode_arrays(self, texts: Sequence[str]) -> Arrays:
        """Encode ``texts`` to concatenated tokens (int32), and the token count per text (int64)."""
        split_texts = [_WORD.findall(text) if _has_words(text) else [text] for text in texts]
        self._learn(set(chain.from_iterable(split_texts)).difference(self._tokens))
        encoded = [b"".join(map(self._tokens.__getitem__, words)) for words in split_texts]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded)) // 4
        self._forget({words[0] for words in split_texts if len(words) == 1})
        return np.frombuffer(bytearray().join(encoded), np.int32), lengths

    def _learn(self, new_words: set[str]) -> None:
        """Encode ``new_words`` and add their tokens to the cache."""
        words = list(new_words)
        tokens, lengths = self._encode(words)
        stops = np.cumsum(lengths) * 4
        data = tokens.tobytes()
        for word, start, stop in zip(words, [0, *stops.tolist()], stops.tolist(), strict=False):
            self._tokens[word] = data[start:stop]
        self._num_characters += _size(words)

    def _forget(self, whole_texts: set[str]) -> None:
        """Remove texts that were not split into words; clear the cache if it is too large."""
        for text in whole_texts:
            del self._tokens[text]
        self._num_characters -= _size(whole_texts)
        if self._num_characters > _CACHE_CHARACTERS:
            self._tokens.clear()
            self._num_characters = 0


def _size(words: Collection[str]) -> int:
    return sum(map(len, words)) + ENTRY_CHARACTERS * len(words)


def _has_words(text: str) -> bool:
    return text.count(" ") * _MAX_MEAN_WORD_CHARS >= len(text)

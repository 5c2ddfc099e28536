"""Tokens that begin a word, for whole-word masking.

| vocabulary | a token begins a word if its text begins with |
|---|---|
| byte-level BPE | white space, a Chinese character, or a character that is neither a letter nor a digit |
| SentencePiece | U+2581, or as above |
| CPM-1 | U+2581, which precedes jieba's words |
| WordPiece | anything except ## |
| others, such as CPM-2 | anything |

A token that begins within a character never begins a word, so that no character is split. Chinese has no spaces. With
CPM-1, its words are jieba's, similar to Chinese-BERT-wwm, which uses a word segmenter; with other vocabularies, each
Chinese token is a word.

Source: Cui et al. 2021, "Pre-training with whole word masking for Chinese BERT".
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from megatron.tokenizer.tokenizer import Tokenizer

_MARK = "\u2581"
_CHINESE = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_CONTINUES_WORD = re.compile(r"[^\W_]|'")
_CHINESE_BYTES = range(0xE3, 0xEA)
"""First UTF-8 bytes of U+3000 ... U+9FFF."""


def word_starts(tokenizer: Tokenizer) -> np.ndarray:
    """Mark tokens that begin a word, bool[vocabulary]; see the table at the top of this file."""
    begins = _RULES[tokenizer.spelling]
    pieces = (tokenizer.piece(token) for token in range(tokenizer.vocab_size))
    return np.array([piece is None or begins(piece) for piece in pieces], bool)


def _text_begins_word(text: str) -> bool:
    return text.startswith(_MARK) or bool(_CHINESE.match(text)) or not _CONTINUES_WORD.match(text)


def _bytes_begin_word(piece: str) -> bool:
    raw = bytes(_BYTES.get(character, 0x20) for character in piece)
    text = raw.decode("utf-8", "ignore")
    if text and raw.startswith(text[0].encode()):
        return _text_begins_word(text)
    return raw[:1] == b"" or raw[0] in _CHINESE_BYTES  # an incomplete character: check its first byte


def _byte_characters() -> dict[int, str]:
    """Map bytes to characters in a byte-level BPE: printable ones to themselves, others to U+0100, U+0101, ...

    Source: Radford et al. 2019, code of GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + idx) for idx, byte in enumerate(others)}


_BYTES = {character: byte for byte, character in _byte_characters().items()}
_RULES: dict[str, Callable[[str], bool]] = {
    "bytes": _bytes_begin_word,
    "text": _text_begins_word,
    "words": lambda piece: piece.startswith(_MARK),
    "continued": lambda piece: not piece.startswith("##") or len(piece) == 2,
    "": lambda piece: True,
}
"""``Tokenizer.spelling`` -> function that returns True if a piece begins a word."""

"""Which tokens of a vocabulary begin a word, for whole-word masking.

| vocabulary | a token begins a word that begins |
|---|---|
| byte-level BPE | with a blank, with a Chinese character, or with neither letter nor digit |
| SentencePiece | with U+2581, or as above |
| CPM-1 | with U+2581, which stands in front of jieba's words |
| WordPiece | not with ## |
| others, as CPM-2 | anyhow |

A byte within a character begins none, so no character is cut. Chinese has no blanks: with CPM-1 its words are
jieba's, whole, as Chinese-BERT-wwm has those of a word cutter; elsewhere each token of it is a word of its own.

Source: Cui et al. 2021, "Pre-training with whole word masking for Chinese BERT".
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from megatron.tokenizer.tokenizer import Tokenizer

_MARK = "\u2581"
_CHINESE = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_GOES_ON = re.compile(r"[^\W_]|'")
_CHINESE_BYTES = range(0xE3, 0xEA)
"""First bytes of U+3000 ... U+9FFF in UTF-8."""


def word_starts(tokenizer: Tokenizer) -> np.ndarray:
    """Return bool[vocabulary], whether a token begins a word: the table at the top of this file."""
    begins = _RULES[tokenizer.spelling]
    pieces = (tokenizer.piece(token) for token in range(tokenizer.vocab_size))
    return np.array([piece is None or begins(piece) for piece in pieces], bool)


def _of_text(text: str) -> bool:
    return text.startswith(_MARK) or bool(_CHINESE.match(text)) or not _GOES_ON.match(text)


def _of_bytes(piece: str) -> bool:
    raw = bytes(_BYTES.get(character, 0x20) for character in piece)
    text = raw.decode("utf-8", "ignore")
    if text and raw.startswith(text[0].encode()):
        return _of_text(text)
    return raw[:1] == b"" or raw[0] in _CHINESE_BYTES  # part of a character: its first byte, or a later one


def _byte_characters() -> dict[int, str]:
    """Return the character that stands for each byte in a byte-level BPE: itself where it can be seen, else U+0100 on.

    Source: Radford et al. 2019, code of GPT-2.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(0x100 + place) for place, byte in enumerate(hidden)}


_BYTES = {character: byte for byte, character in _byte_characters().items()}
_RULES: dict[str, Callable[[str], bool]] = {
    "bytes": _of_bytes,
    "text": _of_text,
    "words": lambda piece: piece.startswith(_MARK),
    "continued": lambda piece: not piece.startswith("##") or len(piece) == 2,
    "": lambda piece: True,
}
"""``Tokenizer.spelling`` -> whether a piece begins a word."""

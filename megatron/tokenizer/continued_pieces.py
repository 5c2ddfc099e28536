"""SentencePiece for chunks of text that continue an earlier chunk.

Most models add a space before a text, remove spaces at both ends, and collapse repeated spaces. A chunk that continues
a word must not get a space; a chunk that begins with a space must get exactly one.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cached_property

import sentencepiece

from megatron.tokenizer.continued_text import move_blanks_forward
from megatron.tokenizer.sentence_piece_model import with_dummy_prefix

_MAYBE_BLANK = ("Cc", "Cf", "Zl", "Zp", "Zs")


class ContinuationEncoder:
    """Encodes chunks that continue an earlier chunk of the same text.

    Args:
        model: ``.model`` file content.
    """

    def __init__(self, model: bytes) -> None:
        self._within_word = sentencepiece.SentencePieceProcessor(model_proto=with_dummy_prefix(model, False))
        self._after_blank = sentencepiece.SentencePieceProcessor(model_proto=with_dummy_prefix(model, True))
        self._drops_blanks = not self._within_word.encode(" ")

    @cached_property
    def _blanks(self) -> str:
        """The characters that the model encodes to no token."""
        characters = map(chr, range(sys.maxunicode + 1))
        candidates = [character for character in characters if unicodedata.category(character) in _MAYBE_BLANK]
        return "".join(
            candidate
            for candidate, ids in zip(candidates, self._within_word.encode(candidates), strict=True)
            if not ids
        )

    def move_blanks_forward(self, chunks: Iterable[str]) -> Iterable[str]:
        """Move blanks at the end of each chunk to the next chunk if the model would drop them."""
        return move_blanks_forward(chunks, self._blanks) if self._drops_blanks else chunks

    def encode(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yield tokens by text."""
        for text in texts:
            library = self._after_blank if self._begins_with_blank(text) else self._within_word
            yield library.encode(text)

    def _begins_with_blank(self, text: str) -> bool:
        if not self._drops_blanks:
            return False
        blanks = text[: len(text) - len(text.lstrip(self._blanks))]
        return bool(blanks) and self._within_word.encode(f"a{blanks}a") != self._within_word.encode("aa")

"""SentencePiece for a chunk of text that continues another chunk.

Most models put a space in front of a text, and drop spaces at both ends and all but one of several. A piece that goes
on within a word must get no space, one that begins behind a space must get just one.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cached_property

import sentencepiece

from megatron.tokenizer.continued_text import with_blanks_in_front
from megatron.tokenizer.sentence_piece_model import with_dummy_prefix

_MAYBE_BLANK = ("Cc", "Cf", "Zl", "Zp", "Zs")


class Continued:
    """Encodes pieces that go on where another piece of the same text stopped.

    Args:
        model: the content of the ``.model`` file.
    """

    def __init__(self, model: bytes) -> None:
        self._within_word = sentencepiece.SentencePieceProcessor(model_proto=with_dummy_prefix(model, False))
        self._behind_blank = sentencepiece.SentencePieceProcessor(model_proto=with_dummy_prefix(model, True))
        self._drops_blanks = not self._within_word.encode(" ")

    @cached_property
    def _blanks(self) -> str:
        """The characters of which the model leaves nothing where they stand alone."""
        every = map(chr, range(sys.maxunicode + 1))
        maybe = [character for character in every if unicodedata.category(character) in _MAYBE_BLANK]
        return "".join(one for one, ids in zip(maybe, self._within_word.encode(maybe), strict=True) if not ids)

    def blanks_in_front(self, pieces: Iterable[str]) -> Iterable[str]:
        """Return the pieces of a text so that none ends in blanks which the model would drop."""
        return with_blanks_in_front(pieces, self._blanks) if self._drops_blanks else pieces

    def encode(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yield the tokens of each of ``texts``."""
        for text in texts:
            library = self._behind_blank if self._begins_with_blank(text) else self._within_word
            yield library.encode(text)

    def _begins_with_blank(self, text: str) -> bool:
        if not self._drops_blanks:
            return False
        blanks = text[: len(text) - len(text.lstrip(self._blanks))]
        return bool(blanks) and self._within_word.encode(f"a{blanks}a") != self._within_word.encode("aa")

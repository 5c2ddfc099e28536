"""The tokenizer of CPM-1: words by jieba, then a SentencePiece vocabulary of 30,000 pieces.

Spaces and line ends of the text become U+2582 and U+2583, a space goes between words. SentencePiece sees NFKC
(full-width marks become ASCII), so text comes back with these changes; a space that the text has beside a word comes
back as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.errors import DataError
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer
from megatron.tokenizer.tokenizer import Arrays, Tokenizer
from megatron.tokenizer.vocabulary import read_vocabulary
from megatron.tokenizer.word_cut import MARK, NO_PIECE, mark_words, to_pieces, to_text

MODEL, NUMBERS = "chinese_vocab.model", "vocab.json"


class CPM1Tokenizer(SentencePieceTokenizer):
    """CPM-1's pieces, with the model's own ids or those of a vocab.json; a piece that this lacks gets id 0 there."""

    def __init__(self, model: Path, numbers: Path | None = None) -> None:
        self._numbers = numbers
        self._own_ids = read_vocabulary(numbers, "<unk>") if numbers else None
        super().__init__(model, [numbers] if numbers else [], "CPM1")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._path, self._numbers)

    @cached_property
    def _id_of_piece(self) -> np.ndarray | None:
        if self._own_ids is None:
            return None
        pieces = map(self._library.id_to_piece, range(self._library.get_piece_size()))
        return np.array([self._own_ids.get(piece, 0) for piece in pieces], np.int32)

    @cached_property
    def _piece_of_id(self) -> dict[int, str]:
        if self._own_ids is None:
            return dict(enumerate(map(self._library.id_to_piece, range(self._library.get_piece_size()))))
        return {token: piece for piece, token in self._own_ids.items()}

    @property
    def vocab_size(self) -> int:
        return super().vocab_size if self._own_ids is None else max(self._own_ids.values()) + 1

    def token_to_id(self, token: str) -> int | None:
        return super().token_to_id(token) if self._own_ids is None else self._own_ids.get(token)

    @property
    def spelling(self) -> str:
        return "words"

    def piece(self, token: int) -> str | None:
        return self._piece_of_id.get(token)

    def _encode_arrays(self, texts: list[str]) -> Arrays:
        tokens, sizes = super()._encode_arrays([to_pieces(words).replace(MARK, " ") for words in mark_words(texts)])
        return (tokens if self._id_of_piece is None else self._id_of_piece[tokens]), sizes

    def encode_pieces(self, pieces: Iterable[str]) -> np.ndarray:
        return Tokenizer.encode_pieces(self, pieces)

    def _encode_continued(self, texts: list[str]) -> Arrays:
        return self._encode_arrays(texts)  # each word has a space in front, and no text comes back with it

    def decode(self, ids: Sequence[int]) -> str:
        pieces = (self._piece_of_id.get(token, NO_PIECE) for token in ids)
        return to_text(self._library.decode_pieces(list(pieces)).replace(" ", ""))


def from_cpm1_files(path: Path) -> CPM1Tokenizer:
    """Return the tokenizer of a ``.model`` file, or of a folder with chinese_vocab.model (also by vocab.json)."""
    folder = path if path.is_dir() else path.parent
    if path.is_file() and path.suffix != ".json":
        return CPM1Tokenizer(path)
    if not (folder / MODEL).exists():
        raise DataError(
            f"--tokenizer-type CPM1 needs a SentencePiece .model file, or a folder with {MODEL} (and {NUMBERS} where "
            f"ids are not the model's own), got {path}"
        )
    return CPM1Tokenizer(folder / MODEL, folder / NUMBERS if (folder / NUMBERS).exists() else None)

"""Greedy longest match over a list of words, as CPM-Pretrain and the first vocabularies of CPM-2 do it.

Words are jieba's, a space is U+2582, a line end U+2583. Of each word the longest beginning that is in the vocabulary is
cut off, again and again; a character with which none begins is ``<unk>``, and so is a word of more than 200 characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.errors import DataError
from megatron.tokenizer.known_words import ENTRY_CHARACTERS
from megatron.tokenizer.tokenizer import Arrays, Tokenizer, as_arrays
from megatron.tokenizer.vocabulary import read_vocabulary
from megatron.tokenizer.word_cut import MARK, NO_PIECE, mark_words, to_pieces, to_text

_UNK = "<unk>"
_LONGEST_WORD = 200
_MOST_CHARACTERS = 1 << 21


class _Words(dict[str, tuple[int, ...]]):
    """The ids of each word met lately."""

    def __init__(self, vocabulary: dict[str, int]) -> None:
        super().__init__()
        self._ids = vocabulary
        self._longest = max(map(len, vocabulary))
        self._num_characters = 0

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = (self._ids[_UNK],) if len(word) > _LONGEST_WORD else tuple(self._longest_matches(word))
        self._num_characters += len(word) + ENTRY_CHARACTERS
        if self._num_characters > _MOST_CHARACTERS:
            self.clear()
            self._num_characters = len(word) + ENTRY_CHARACTERS
        self[word] = ids
        return ids

    def _longest_matches(self, word: str) -> list[int]:
        ids, start = [], 0
        while start < len(word):
            stop = min(len(word), start + self._longest)
            while stop > start and word[start:stop] not in self._ids:
                stop -= 1
            ids.append(self._ids[word[start:stop] if stop > start else _UNK])
            start = max(stop, start + 1)
        return ids


class CPM2Tokenizer(Tokenizer):
    """A vocabulary of words, with ``<unk>`` and control tokens among them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids = read_vocabulary(path, _UNK)
        if any(token.startswith("##") and len(token) > 2 for token in self._ids):
            raise DataError(
                f"{path} must be a vocabulary without pieces that begin with ##, as CPM-Pretrain's; CPM-2's of Chinese "
                "and English, and BERT's (--tokenizer-type BertWordPiece), are matched by other rules."
            )
        self._pieces = {token: piece for piece, token in self._ids.items()}
        self._words = _Words(self._ids)
        super().__init__([path], "CPM2")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._path,)

    @property
    def vocab_size(self) -> int:
        return max(self._pieces) + 1

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def decode(self, ids: Sequence[int]) -> str:
        return to_text("".join(self._pieces.get(token, NO_PIECE) for token in ids))

    def _encode_arrays(self, texts: list[str]) -> Arrays:
        return as_arrays([self._ids_of(words) for words in mark_words(texts)])

    def _ids_of(self, words: str) -> list[int]:
        if not words:
            return []
        return [token for ids in map(self._words.__getitem__, to_pieces(words).split(MARK)) for token in ids]


def from_cpm2_files(path: Path) -> CPM2Tokenizer:
    """Return the tokenizer of a ``vocab.txt`` or JSON file, or of a folder with vocab.txt."""
    vocab = path / "vocab.txt" if path.is_dir() else path
    if not vocab.exists():
        raise DataError(f"--tokenizer-type CPM2 needs vocab.txt, a folder with it, or a JSON file, got {path}")
    return CPM2Tokenizer(vocab)

"""CPM-1 and CPM-2 tokenizers. Chinese words are identical to jieba's and are computed twenty times as fast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.errors import DataError
from megatron.tokenizer.build import read_vocabulary
from megatron.tokenizer.chinese_words import MARK, NO_PIECE, mark_words, replace_spaces, restore_spaces
from megatron.tokenizer.known_words import ENTRY_CHARACTERS
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer
from megatron.tokenizer.tokenizer import Arrays, Tokenizer, as_arrays

# The tokenizer of CPM-1: words by jieba, then a SentencePiece vocabulary of 30,000 pieces.
#
# Spaces and line ends are replaced by U+2582 and U+2583, and words are separated by spaces. SentencePiece applies NFKC
# (full-width punctuation becomes ASCII), so decoding returns the normalized text. Spaces in the text are preserved.

MODEL_FILE, IDS_FILE = "chinese_vocab.model", "vocab.json"


class CPM1Tokenizer(SentencePieceTokenizer):
    """CPM-1's pieces with ids from the model or a vocab.json; pieces that are not in vocab.json have id 0."""

    def __init__(self, model: Path, ids_file: Path | None = None) -> None:
        self._ids_file = ids_file
        self._custom_ids = read_vocabulary(ids_file, "<unk>") if ids_file else None
        super().__init__(model, [ids_file] if ids_file else [], "CPM1")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._path, self._ids_file), self.eod_name

    def _identity_values(self) -> Iterable[Any]:
        return [*super()._identity_values(), sorted((self._custom_ids or {}).items())]

    @cached_property
    def _id_of_piece(self) -> np.ndarray | None:
        if self._custom_ids is None:
            return None
        pieces = map(self._library.id_to_piece, range(self._library.get_piece_size()))
        return np.array([self._custom_ids.get(piece, 0) for piece in pieces], np.int32)

    @cached_property
    def _piece_of_id(self) -> dict[int, str]:
        if self._custom_ids is None:
            return dict(enumerate(map(self._library.id_to_piece, range(self._library.get_piece_size()))))
        return {token: piece for piece, token in self._custom_ids.items()}

    @property
    def vocab_size(self) -> int:
        return super().vocab_size if self._custom_ids is None else max(self._custom_ids.values()) + 1

    def token_to_id(self, token: str) -> int | None:
        return super().token_to_id(token) if self._custom_ids is None else self._custom_ids.get(token)

    @property
    def spelling(self) -> str:
        return "words"

    def piece(self, token: int) -> str | None:
        return self._piece_of_id.get(token)

    def _encode_arrays(self, texts: list[str]) -> Arrays:
        tokens, lengths = super()._encode_arrays(
            [replace_spaces(words).replace(MARK, " ") for words in mark_words(texts)]
        )
        return (tokens if self._id_of_piece is None else self._id_of_piece[tokens]), lengths

    def encode_chunks(self, chunks: Iterable[str]) -> np.ndarray:
        return Tokenizer.encode_chunks(self, chunks)

    def _encode_continued(self, texts: list[str]) -> Arrays:
        return self._encode_arrays(texts)  # decode() removes the space before each word

    def decode(self, ids: Sequence[int]) -> str:
        pieces = (self._piece_of_id.get(token, NO_PIECE) for token in ids)
        return restore_spaces(self._library.decode_pieces(list(pieces)).replace(" ", ""))


def from_cpm1_files(path: Path) -> CPM1Tokenizer:
    """Load a ``.model`` file, or a folder with chinese_vocab.model.

    If ``path`` is a vocab.json, the folder that contains it is loaded.
    """
    folder = path if path.is_dir() else path.parent
    if path.is_file() and path.suffix != ".json":
        return CPM1Tokenizer(path)
    if not (folder / MODEL_FILE).exists():
        raise DataError(
            f"--tokenizer-type CPM1 needs a SentencePiece .model file, or a folder with {MODEL_FILE} (and {IDS_FILE} "
            f"if the ids differ from the model's), got {path}"
        )
    return CPM1Tokenizer(folder / MODEL_FILE, folder / IDS_FILE if (folder / IDS_FILE).exists() else None)


# Greedy longest match over a list of words, like CPM-Pretrain and the first vocabularies of CPM-2.
#
# Words are the same as jieba's. Spaces and line ends are replaced by U+2582 and U+2583. From each word, the longest
# prefix in the vocabulary is removed repeatedly. If there is no such prefix, the first character becomes ``<unk>``. A
# word of more than 200 characters is a single ``<unk>``.

_UNK = "<unk>"
_MAX_WORD_CHARS = 200
_MAX_CHARACTERS = 1 << 21


class _WordCache(dict[str, tuple[int, ...]]):
    """A bounded cache of word -> ids."""

    def __init__(self, vocabulary: dict[str, int]) -> None:
        super().__init__()
        self._ids = vocabulary
        self._longest = max(map(len, vocabulary))
        self._num_characters = 0

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = (self._ids[_UNK],) if len(word) > _MAX_WORD_CHARS else tuple(self._longest_matches(word))
        self._num_characters += len(word) + ENTRY_CHARACTERS
        if self._num_characters > _MAX_CHARACTERS:
            self.clear()
            self._num_characters = len(word) + ENTRY_CHARACTERS
        self[word] = ids
        return ids

    def _longest_matches(self, word: str) -> list[int]:
        """Encode ``word`` by repeated longest match."""
        ids, start = [], 0
        while start < len(word):
            stop = min(len(word), start + self._longest)
            while stop > start and word[start:stop] not in self._ids:
                stop -= 1
            ids.append(self._ids[word[start:stop] if stop > start else _UNK])
            start = max(stop, start + 1)
        return ids


class CPM2Tokenizer(Tokenizer):
    """A vocabulary of words, including ``<unk>`` and control tokens."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids = read_vocabulary(path, _UNK)
        if any(token.startswith("##") and len(token) > 2 for token in self._ids):
            raise DataError(
                f"{path} must be a vocabulary without pieces that begin with ##, such as CPM-Pretrain's. CPM-2's "
                "Chinese-English vocabulary follows other rules and is not supported. For BERT's vocabularies, use "
                "--tokenizer-type BertWordPiece."
            )
        self._pieces = {token: piece for piece, token in self._ids.items()}
        self._words = _WordCache(self._ids)
        super().__init__([path], "CPM2")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._path,), self.eod_name

    def _identity_values(self) -> Iterable[Any]:
        return [self.settings, sorted(self._ids.items())]

    @property
    def vocab_size(self) -> int:
        return max(self._pieces) + 1

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def decode(self, ids: Sequence[int]) -> str:
        return restore_spaces("".join(self._pieces.get(token, NO_PIECE) for token in ids))

    def _encode_arrays(self, texts: list[str]) -> Arrays:
        return as_arrays([self._ids_of(words) for words in mark_words(texts)])

    def _ids_of(self, words: str) -> list[int]:
        if not words:
            return []
        return [token for ids in map(self._words.__getitem__, replace_spaces(words).split(MARK)) for token in ids]


def from_cpm2_files(path: Path) -> CPM2Tokenizer:
    """Load a ``vocab.txt`` or JSON file, or a folder with vocab.txt."""
    vocab = path / "vocab.txt" if path.is_dir() else path
    if not vocab.exists():
        raise DataError(f"--tokenizer-type CPM2 needs vocab.txt, a folder with it, or a JSON file, got {path}")
    return CPM2Tokenizer(vocab)

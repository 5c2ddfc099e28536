"""CPM-1 and CPM-2 tokenizers; Chinese words as jieba cuts them, twenty times as fast."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import rjieba
from jieba import finalseg
from jieba.finalseg import MIN_FLOAT, emit_P, start_P, trans_P

from megatron.errors import DataError
from megatron.tokenizer.build import read_vocabulary
from megatron.tokenizer.huggingface import ENTRY_CHARACTERS
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer
from megatron.tokenizer.tokenizer import Arrays, Tokenizer, as_arrays

# jieba's hidden Markov model: which characters of an unknown run belong together; for many runs at once.
#
# Each character begins a word, goes on with it, ends it or is one. Sums are taken in jieba's order in float64, and
# equal ones are decided as jieba decides them, so that the words are the same to the last one.

_STATES = "BMES"
_BEFORE = {"B": "ES", "M": "BM", "E": "BM", "S": "ES"}
"""What may stand before each state; of equal paths jieba takes the second."""
_FIRST, _LAST = 0x4E00, 0x9FD5
_UTF_32 = "utf-32-le"


def _table(probabilities: Mapping[str, float]) -> np.ndarray:
    table = np.full(_LAST - _FIRST + 1, MIN_FLOAT)
    for character, value in probabilities.items():
        if _FIRST <= ord(character) <= _LAST:
            table[ord(character) - _FIRST] = value
    return table


_EMITTED = {state: _table(emit_P[state]) for state in _STATES}


def mark_chinese_words(runs: Sequence[str], mark: str) -> dict[str, str]:
    """Return each run of characters between U+4E00 and U+9FD5 with ``mark`` between its words.

    Args:
        runs: from long to short, none empty.
    """
    lengths = np.array([len(run) for run in runs], np.int64)
    starts = np.cumsum(lengths) - lengths
    characters = np.frombuffer("".join(runs).encode(_UTF_32), np.uint32)
    ends = _word_ends(characters.astype(np.int64) - _FIRST, lengths, starts)
    marked = np.insert(characters, np.flatnonzero(ends) + 1, ord(mark)).tobytes().decode(_UTF_32, "surrogatepass")
    stops = np.cumsum(lengths + np.add.reduceat(ends, starts)) if len(runs) else lengths
    return {
        run: marked[start : stop - 1]  # without the mark behind the last word
        for run, start, stop in zip(runs, [0, *stops.tolist()], stops.tolist(), strict=False)
    }


def _word_ends(codes: np.ndarray, lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return for each character whether a word ends with it."""
    took_second = {state: np.zeros(len(codes), bool) for state in _STATES}
    longest = int(lengths[0]) if len(lengths) else 0
    first = codes[starts]
    score = {state: start_P[state] + _EMITTED[state][first] for state in _STATES}
    final_is_single = np.zeros(len(lengths), bool)
    for step in range(1, longest + 1):
        going_on = int(np.searchsorted(-lengths, -step, side="left"))  # runs longer than `step`
        final_is_single[going_on : len(score["S"])] = (score["S"] >= score["E"])[going_on:]
        places = starts[:going_on] + step
        score = {state: _step(state, score, codes[places], places, took_second[state]) for state in _STATES}
    return _follow_back(took_second, final_is_single, lengths, starts)


def _step(
    state: str, score: dict[str, np.ndarray], codes: np.ndarray, places: np.ndarray, took_second: np.ndarray
) -> np.ndarray:
    emitted = _EMITTED[state][codes]
    first, second = (
        score[before][: len(codes)] + trans_P[before].get(state, MIN_FLOAT) + emitted for before in _BEFORE[state]
    )
    took_second[places] = second >= first
    return np.maximum(first, second)


def _follow_back(
    took_second: dict[str, np.ndarray], final_is_single: np.ndarray, lengths: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    """Walk each best path from its last character to its first; states are numbers, 0 ... 3 for B, M, E, S."""
    second = np.stack([took_second[state] for state in _STATES])
    before = np.array([[_STATES.index(name) for name in _BEFORE[state]] for state in _STATES])
    ends = np.zeros(second.shape[1], np.int64)
    state = np.where(final_is_single, 3, 2)
    for back in range(int(lengths[0]) if len(lengths) else 0):
        active = int(np.searchsorted(-lengths, -back, side="left"))  # runs longer than `back`
        place = starts[:active] + lengths[:active] - 1 - back
        now = state[:active]
        ends[place] = now >= 2
        state = before[now, second[now, place].astype(np.int64)]
    return ends


# Chinese words as `jieba` cuts them, some twenty times as fast.
#
# `rjieba` follows the same route through the same dictionary, but for four things: the words that it makes of runs of
# unknown characters (its probabilities are rounded), the marks ``.``, ``-`` and ``_`` within such runs, Chinese
# characters outside U+4E00 ... U+9FD5, which jieba takes for marks, and the sum of all frequencies, in which jieba
# counts a word twice that its dictionary has twice. So rjieba, with that sum put right, does the route alone, on text
# without such characters, and the runs that are left as single characters are joined here by jieba's own rules and
# tables. jieba's dictionary is never loaded: no wait, no cache file.

MARK = "\ud800"
"""Stands between words: a lone surrogate, which no text that can be encoded has."""

NO_PIECE = "\ufffd"
"""Stands in a text for an id that the vocabulary does not have."""

_TEXT_END = "\ud801"
_HAN = "\u4e00-\u9fd5"
_UNIT = f"(?:[{_HAN}]|[a-zA-Z0-9]+|[-+#&._%])"
_RUN = re.compile(f"{MARK}({_UNIT}(?:{MARK}{_UNIT})+)(?={MARK})")
_OTHER_HAN = re.compile("([\u3400-\u4dbf\u9fd6-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])")
_MOST_KNOWN = 1 << 18

_known_runs: dict[str, str] = {}
_dictionary = rjieba.Jieba()
# No word of a text has it: its 3 make up for the second line of a word in jieba's list.
_dictionary.add_word("\0", 3, None)
_SPACE, _LINE_END = "\u2582", "\u2583"


def to_pieces(text: str) -> str:
    """Return ``text`` with the characters that stand for a space and a line end in CPM's vocabularies."""
    return text.replace(" ", _SPACE).replace("\n", _LINE_END)


def to_text(pieces: str) -> str:
    """Undo ``to_pieces``."""
    return pieces.replace(_SPACE, " ").replace(_LINE_END, "\n")


def mark_words(texts: Sequence[str]) -> list[str]:
    """Return each text with ``MARK`` between its words; they are those of ``jieba.cut(text)``."""
    if not texts:
        return []
    parts = _RUN.split(_TEXT_END.join(_route(text) for text in texts))  # what no run holds, a run, and so on
    _learn(parts[1::2])
    parts[1::2] = map(_known_runs.__getitem__, parts[1::2])
    return [marked[1:-1] for marked in "".join(parts).split(_TEXT_END)]


def _route(text: str) -> str:
    """Return jieba's route through the dictionary: a mark before and behind each word or character without one."""
    if _OTHER_HAN.search(text) is None:
        return f"{MARK}{MARK.join(_dictionary.cut(text, False))}{MARK}"
    words = (
        word
        for place, part in enumerate(_OTHER_HAN.split(text))
        for word in ([part] if place % 2 else _dictionary.cut(part, False))
    )
    return f"{MARK}{MARK.join(words)}{MARK}"


def _learn(runs: Iterable[str]) -> None:
    if len(_known_runs) > _MOST_KNOWN:
        _known_runs.clear()
    plain = {run: run.replace(MARK, "") for run in set(runs).difference(_known_runs)}
    marked = _mark_runs([text for text in plain.values() if not _dictionary.has_word(text)])
    for run, text in plain.items():  # a word of the dictionary that the route left in characters stays in characters
        _known_runs[run] = MARK + (marked.get(text) or MARK.join(text))


def _mark_runs(runs: Sequence[str]) -> dict[str, str]:
    """Cut runs of characters without a word: Chinese by probability, letters, digits and signs by jieba's pattern.

    The result holds ``runs`` and nothing else: a Chinese part of one of them may be a word of the dictionary.
    """
    mixed = {run: finalseg.re_han.split(run) for run in runs if finalseg.re_han.fullmatch(run) is None}
    chinese = {part for parts in mixed.values() for part in parts[1::2]}.union(run for run in runs if run not in mixed)
    marked = mark_chinese_words(sorted(chinese, key=len, reverse=True), MARK)
    return {run: MARK.join(_marked_parts(mixed[run], marked)) if run in mixed else marked[run] for run in runs}


def _marked_parts(parts: list[str], chinese: dict[str, str]) -> Iterator[str]:
    for place, part in enumerate(parts):  # other, Chinese, other, and so on
        yield from [chinese[part]] if place % 2 else filter(None, finalseg.re_skip.split(part))


# The tokenizer of CPM-1: words by jieba, then a SentencePiece vocabulary of 30,000 pieces.
#
# Spaces and line ends of the text become U+2582 and U+2583, a space goes between words. SentencePiece sees NFKC
# (full-width marks become ASCII), so text comes back with these changes; a space that the text has beside a word comes
# back as it was.

MODEL, NUMBERS = "chinese_vocab.model", "vocab.json"


class CPM1Tokenizer(SentencePieceTokenizer):
    """CPM-1's pieces, with the model's own ids or those of a vocab.json; a piece that this lacks gets id 0 there."""

    def __init__(self, model: Path, numbers: Path | None = None) -> None:
        self._numbers = numbers
        self._own_ids = read_vocabulary(numbers, "<unk>") if numbers else None
        super().__init__(model, [numbers] if numbers else [], "CPM1")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._path, self._numbers), self.eod_name

    def _facts(self) -> Iterable[Any]:
        return [*super()._facts(), sorted((self._own_ids or {}).items())]

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


# Greedy longest match over a list of words, as CPM-Pretrain and the first vocabularies of CPM-2 do it.
#
# Words are jieba's, a space is U+2582, a line end U+2583. Of each word the longest beginning that is in the vocabulary
# is cut off, again and again; a character with which none begins is ``<unk>``, and so is a word of more than 200
# characters.

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
        return type(self), (self._path,), self.eod_name

    def _facts(self) -> Iterable[Any]:
        return [self.settings, sorted(self._ids.items())]

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

"""Which tokens of a text are masked, and what stands in their place. All of it works on whole arrays.

| share of what is masked | becomes |
|---|---|
| 0.8 | the mask token |
| 0.1 | a token of the vocabulary, all alike but for control tokens |
| 0.1 | what it was |

Source: Devlin et al. 2019, "BERT", section 3.1; whole words: the authors' code of May 2019.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron.data.bert_control import BertTokens

NOTHING = -1
"""Label of a token that is not to be predicted."""
_MASKED, _MASKED_OR_RANDOM = np.uint64(0.8 * 2**64), np.uint64(0.9 * 2**64)
DRAWS = 3
"""Random words that a token takes."""


class Masked(NamedTuple):
    """Tokens with some masked, and what these were; ``NOTHING`` elsewhere. int64 both."""

    tokens: np.ndarray
    labels: np.ndarray


def num_to_mask(length: int, probability: float) -> int:
    """Return how many of ``length`` tokens are masked: that share, rounded, and one at least."""
    return max(1, round(probability * length))


def mask(
    text: np.ndarray, count: int, words: np.ndarray, tokens: BertTokens, is_start: np.ndarray | None = None
) -> Masked:
    """Return ``text`` with ``count`` tokens masked, or all that may be where there are fewer.

    Args:
        words: uint64[3 n], random.
        is_start: bool[n], where a word begins; given, words are masked whole. One that has more tokens than are left to
            mask is passed over, so that a few tokens fewer may be masked.
    """
    by_place, by_kind, by_token = words.reshape(DRAWS, len(text))
    may = tokens.is_word[text]
    places = _tokens(may, count, by_place) if is_start is None else _whole_words(may, is_start, count, by_place)
    labels = np.full(len(text), NOTHING, np.int64)
    labels[places] = text[places]
    masked, kind = text.copy(), by_kind[places]
    random = tokens.word_ids[by_token[places] % np.uint64(len(tokens.word_ids))]
    masked[places] = np.where(kind < _MASKED, tokens.mask_id, np.where(kind < _MASKED_OR_RANDOM, random, text[places]))
    return Masked(masked, labels)


def _tokens(may: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    places = np.flatnonzero(may)
    return places[keys[places].argsort(kind="stable")[:count]]


def _whole_words(may: np.ndarray, is_start: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """Return the places of words in a random order, each taken if it still fits. A control token is a word."""
    is_start = is_start | ~may
    is_start[0] = True
    is_start[1:] |= ~may[:-1]
    firsts = np.flatnonzero(is_start)
    sizes = np.diff(firsts, append=len(may))
    free = np.flatnonzero(may[firsts])
    order = free[keys[firsts[free]].argsort(kind="stable")]
    taken = order[_fitting(sizes[order], count)]
    places: np.ndarray = np.repeat(firsts[taken] - (sizes[taken].cumsum() - sizes[taken]), sizes[taken])
    return places + np.arange(len(places))


def _fitting(sizes: np.ndarray, room: int) -> np.ndarray:
    """Return which of ``sizes``, tried one after the other, find room."""
    found, start = [], 0
    while room > 0 and start < len(sizes):
        ends = sizes[start:].cumsum()
        number = int(ends.searchsorted(room, "right"))
        found.append(np.arange(start, start + number))
        room -= int(ends[number - 1]) if number else 0
        start += number
        smaller = np.flatnonzero(sizes[start:] <= room)
        start = start + int(smaller[0]) if len(smaller) else len(sizes)
    return np.concatenate(found) if found else np.zeros(0, np.int64)

"""jieba's hidden Markov model: which characters of an unknown run belong together; for many runs at once.

Each character begins a word, goes on with it, ends it or is one. Sums are taken in jieba's order in float64, and equal
ones are decided as jieba decides them, so that the words are the same to the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jieba.finalseg import MIN_FLOAT, emit_P, start_P, trans_P

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

"""Choose the corpus for each sample in a blend, as megatron-core's ``BlendedDataset`` selects it.

Sample n comes from the corpus whose share lags most: the first corpus with the largest ``w_k max(n, 1) - c_k`` in
float64, where ``c_k`` counts the earlier samples from corpus k. Each choice depends on all earlier ones, and a loop
over 10^7 samples takes minutes in Python. The choices are therefore computed in parallel and then checked:

1. The samples are divided into up to 4,096 lanes, which run in lockstep with vectorized arithmetic.
2. A lane starts a few samples early from the nearest whole counts. The selection forgets its start: from a slightly
   wrong start, it soon reaches the sequential loop's counts.
3. A lane's final counts must equal the counts with which the next lane has started. A lane that started with
   other counts is repeated from its predecessor's counts, until all lanes agree.

By induction over the lanes, the result is exactly the sequential loop's.
"""

from __future__ import annotations

import numpy as np

_MAX_LANES = 4096
_MIN_LANE_LENGTH = 256
_WARM_UP = 64
_LARGEST_INT16, _LARGEST_INT32 = np.iinfo(np.int16).max, np.iinfo(np.int32).max


def blend_choices(weights: np.ndarray, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose the samples' corpora (int16) and their indices within the corpora (int32, or int64 if necessary).

    Args:
        weights: float64, positive; their sum is 1 up to rounding.
    """
    assert 0 < len(weights) <= _LARGEST_INT16
    lane_length = max(-(-num_samples // _MAX_LANES), _MIN_LANE_LENGTH)
    starts = np.arange(0, num_samples, lane_length)
    corpora = np.empty((lane_length, len(starts)), np.int16)
    counts = _start_counts(weights, starts)
    ends = _run_lanes(weights, starts, counts, corpora)
    while True:
        wrong = 1 + np.flatnonzero((ends[:, :-1] != counts[:, 1:]).any(axis=0))
        if not len(wrong):
            break
        counts[:, wrong] = ends[:, wrong - 1]
        repeated = np.empty((lane_length, len(wrong)), np.int16)
        ends[:, wrong] = _run_lanes(weights, starts[wrong], counts[:, wrong], repeated)
        corpora[:, wrong] = repeated
    choices = np.ascontiguousarray(corpora.T).reshape(-1)[:num_samples]
    return choices, _indices_within_corpora(choices, len(weights))


def _start_counts(weights: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Estimate samples per corpus before the start of each lane: float64[corpora, lanes]."""
    early = np.maximum(starts - _WARM_UP, 0)
    counts = _run_lanes(weights, early, _nearest_counts(weights, early), np.empty((_WARM_UP, len(starts)), np.int16))
    is_short = starts < _WARM_UP
    counts[:, is_short] = _nearest_counts(weights, starts[is_short])
    return counts


def _nearest_counts(weights: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Round ``weights * starts`` to whole numbers whose sum over the corpora is ``starts``."""
    exact = np.multiply.outer(weights, starts.astype(np.float64))
    counts = np.floor(exact)
    missing = starts - counts.sum(axis=0)
    rank = np.argsort(np.argsort(counts - exact, axis=0, kind="stable"), axis=0, kind="stable")
    counts += rank < missing
    return counts


def _run_lanes(weights: np.ndarray, starts: np.ndarray, counts: np.ndarray, corpora: np.ndarray) -> np.ndarray:
    """Select the corpora for ``len(corpora)`` samples per lane, starting at ``starts``; return the final counts.

    Args:
        counts: float64[corpora, lanes], samples per corpus before the start of a lane.
        corpora: int16[samples, lanes], filled with the selected corpora.
    """
    counts, positions = counts.copy(), starts.astype(np.float64)
    largest, lag = np.empty_like(positions), np.empty_like(positions)
    is_larger = np.empty(len(positions), bool)
    for choices in corpora:
        factor = np.maximum(positions, 1.0)
        np.multiply(weights[0], factor, out=largest)
        largest -= counts[0]
        choices[:] = 0
        for corpus in range(1, len(weights)):
            np.multiply(weights[corpus], factor, out=lag)
            lag -= counts[corpus]
            np.greater(lag, largest, out=is_larger)
            np.copyto(choices, corpus, where=is_larger)
            np.maximum(largest, lag, out=largest)
        for corpus in range(len(weights)):
            np.equal(choices, corpus, out=is_larger)
            counts[corpus] += is_larger
        positions += 1
    return counts


def _indices_within_corpora(choices: np.ndarray, num_corpora: int) -> np.ndarray:
    """Count the earlier samples from the same corpus for each sample."""
    dtype = np.int32 if len(choices) <= _LARGEST_INT32 else np.int64
    by_corpus = np.argsort(choices, kind="stable")
    sizes = np.bincount(choices, minlength=num_corpora)
    indices = np.empty(len(choices), dtype)
    indices[by_corpus] = np.concatenate([np.arange(size, dtype=dtype) for size in sizes])
    return indices

"""How many spans and how much noise each document of a window gets, so that the window's totals stay exact.

A window's lengths follow from its totals, so documents that are kept apart must share these: on average each gets its
part by length, and what rounding leaves over falls by chance (systematic sampling). A document in which a span of the
mean length has no room gets none and is only read by the encoder. Where so many are that short that the others cannot
hold all spans, the shortest join their neighbours, and count as one document with them, until there is room.

Source: Madow 1949, "On the theory of systematic sampling, II", section 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def apportion(
    sizes: Sequence[int], noise: int, spans: int, words: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens, tokens to cut out, spans) of each document that stays apart, int64[number of documents] each.

    Args:
        sizes: tokens of the documents of one window, in order.
        noise, spans: totals of the window. They leave at least one token in front of each span.
        words: two random words.
    """
    tokens_per_span = -(-noise // spans) + 1
    sizes, shortest = list(sizes), 1
    while len(sizes) > 1 and sum(size // tokens_per_span for size in sizes) < spans:
        shortest *= 2
        sizes = _join(sizes, shortest)
    tokens = np.array(sizes, np.int64)
    if len(sizes) == 1:
        return tokens, np.array([noise]), np.array([spans])
    counts = _share(spans, tokens, tokens // tokens_per_span, int(words[0]))
    more = _share(noise - spans, counts, np.where(counts > 0, tokens - 2 * counts, 0), int(words[1]))
    return tokens, counts + more, counts


def _join(sizes: Sequence[int], shortest: int) -> list[int]:
    """Return the sizes after each below ``shortest`` has joined the one behind it, or the last the one before."""
    joined = [sizes[0]]
    for size in sizes[1:]:
        if joined[-1] < shortest:
            joined[-1] += size
        else:
            joined.append(size)
    if len(joined) > 1 and joined[-1] < shortest:
        joined[-2:] = [sum(joined[-2:])]
    return joined


def _share(total: int, weights: np.ndarray, room: np.ndarray, word: int) -> np.ndarray:
    """Return counts that sum to ``total``, on average proportional to ``weights`` and nowhere above ``room``."""
    weights = np.where(room > 0, weights, 0)
    whole = int(weights.sum())
    if not total:
        return np.zeros_like(weights)
    bounds = (np.cumsum(weights) * total + word % whole) // whole
    counts = np.minimum(np.diff(bounds, prepend=0), room)
    free = room - counts
    left_over = total - int(counts.sum())
    return counts + np.clip(left_over - (np.cumsum(free) - free), 0, free)

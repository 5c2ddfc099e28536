"""Cutting spans out of a text: which ones, and what inputs and targets then are.

All of it works on whole arrays. Splitting n tokens into k parts of at least one token, all ways equally likely, is
choosing k - 1 of the n - 1 places between them: those with the smallest random keys. The same sort does it for
several documents at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron.data.apportion import apportion
from megatron.data.runs import runs
from megatron.spans import Denoiser, noise_and_spans

_WORDS_OF_DOCUMENTS = 2


class Spans(NamedTuple):
    """A text as pieces that stay, each with the number of tokens cut out behind it.

    ``kept`` >= 1 and ``cut`` are int64[P]; ``cut`` is 0 only behind the one piece of a document without spans.
    ``documents`` int64[P] is the number, within the text, of the document that a piece belongs to.
    """

    kept: np.ndarray
    cut: np.ndarray
    documents: np.ndarray


class Pair(NamedTuple):
    """Inputs and targets without what frames them, and the document of each token; int64 all."""

    inputs: np.ndarray
    targets: np.ndarray
    input_documents: np.ndarray
    target_documents: np.ndarray


def num_words(length: int) -> int:
    """Return how many random words the spans of a text of ``length`` take."""
    return length + _WORDS_OF_DOCUMENTS


def draw_spans(sizes: Sequence[int], denoiser: Denoiser, words: np.ndarray) -> Spans:
    """Return spans of a text whose documents have ``sizes`` tokens; none crosses the end of a document.

    Their number and the tokens in them are those of a text without documents (``spans.noise_and_spans``).
    """
    length = sum(sizes)
    noise, spans = noise_and_spans(length, denoiser)
    tokens, noises, counts = apportion(sizes, noise, spans, words)
    words = words[_WORDS_OF_DOCUMENTS:]
    pieces = np.maximum(counts, 1)
    has_span = np.repeat(counts > 0, pieces)
    kept = compositions(tokens - noises, pieces, words[noise:length])
    cut = np.zeros_like(kept)
    cut[has_span] = compositions(noises, counts, words[:noise])
    return Spans(kept, cut, np.repeat(np.arange(len(pieces)), pieces))


def compositions(totals: np.ndarray, parts: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return ``parts[i]`` numbers >= 1 that sum to ``totals[i]``, for one i after the other; each way equally likely.

    Args:
        totals: int64[n], 0 only where ``parts`` is 0, else at least ``parts``.
        words: uint64[sum(totals)], random.
    """
    num_words, num_groups = len(words), len(totals)
    place_bits, group_bits = num_words.bit_length(), num_groups.bit_length()
    place_mask = np.uint64((1 << place_bits) - 1)
    # A key is group, random bits, place: no two are equal, so that any way to sort gives the same.
    keys = words >> np.uint64(group_bits)
    keys &= ~place_mask
    if num_groups == 1:
        keys[:1] = 0  # a group's first token always starts a part
        chosen: slice | np.ndarray = slice(int(parts[0]))
    else:
        firsts = totals.cumsum() - totals
        keys[firsts[totals > 0]] = 0
        keys |= (np.arange(num_groups, dtype=np.uint64) << np.uint64(64 - group_bits)).repeat(totals)
        chosen = runs(firsts, parts)
    keys |= np.arange(num_words, dtype=np.uint64)
    keys.sort()
    starts = keys[chosen] & place_mask
    starts.sort()
    bounds = np.append(starts.view(np.int64), num_words)
    return bounds[1:] - bounds[:-1]


def cut_out(text: np.ndarray, spans: Spans, sentinels: np.ndarray) -> Pair:
    """Return the text with a sentinel for each span, and the spans with their sentinel in front of each.

    Sentinels count from the first one in each document.
    """
    kept, cut, documents = spans
    has_span, length = (cut > 0).astype(np.int64), len(text)
    num_cut = int(cut.sum())
    number = has_span.cumsum() - has_span
    in_document = number - number[documents.searchsorted(documents)]
    # Both are runs out of the text and the names behind it: (piece, name) of each piece, then (name, span).
    names = length + np.arange(len(cut))
    ends = (kept + cut).cumsum()
    starts = np.array([[ends - cut - kept, names], [names, ends - cut]])
    lengths = np.array([[kept, has_span], [has_span, cut]])
    source = np.concatenate([text, sentinels[in_document]])
    both = source[runs(starts.transpose(0, 2, 1).ravel(), lengths.transpose(0, 2, 1).ravel())]
    num_inputs = length - num_cut + int(has_span.sum())
    return Pair(
        both[:num_inputs],
        both[num_inputs:],
        documents.repeat(kept + has_span),
        documents.repeat(cut + has_span),
    )

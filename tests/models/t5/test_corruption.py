"""What cutting spans out of a text must keep, for any text, documents and denoiser."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.permutation import random_words
from megatron.models.t5.data import (
    InputsAndTargets,
    Spans,
    corrupt_spans,
    draw_spans,
    num_random_words,
    random_compositions,
    split_noise,
)
from megatron.models.t5.spans import Denoiser, noise_and_spans, parse_denoisers

SENTINELS = np.arange(99_999, 90_000, -1)
DENOISERS = parse_denoisers("R,X,S", 0.15, 3.0)

denoisers = st.sampled_from([*DENOISERS, *parse_denoisers("R", 0.5, 1.0), *parse_denoisers("R", 0.3, 1.5)])
document_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) > 1)
seeds = st.integers(0, 2**40)


def draw_document_spans(lengths: list[int], denoiser: Denoiser, seed: int) -> Spans:
    return draw_spans(lengths, denoiser, random_words(num_random_words(sum(lengths)), "test", seed))


def restore_text(pair: InputsAndTargets) -> list[int]:
    """Return the text that inputs and targets were made of, put together as a reader would."""
    spans: dict[tuple[int, int], list[int]] = {}
    for token, document in zip(pair.targets.tolist(), pair.target_documents.tolist(), strict=True):
        if token in SENTINELS:
            current = spans.setdefault((document, token), [])
        else:
            current.append(token)
    text = []
    for token, document in zip(pair.inputs.tolist(), pair.input_documents.tolist(), strict=True):
        text += spans.pop((document, token)) if token in SENTINELS else [token]
    assert not spans
    return text


@settings(deadline=None)
@given(document_lengths, denoisers, seeds)
def test_inputs_and_targets_restore_text_with_exact_lengths(lengths: list[int], denoiser: Denoiser, seed: int) -> None:
    length = sum(lengths)
    noise, spans = noise_and_spans(length, denoiser)
    text = np.arange(length)
    pair = corrupt_spans(text, draw_document_spans(lengths, denoiser, seed), SENTINELS)
    assert restore_text(pair) == text.tolist()
    assert len(pair.inputs) == length - noise + spans and len(pair.targets) == noise + spans
    for tokens, documents in ((pair.inputs, pair.input_documents), (pair.targets, pair.target_documents)):
        for document in range(len(lengths)):
            sentinels = [t for t in tokens[documents == document].tolist() if t in SENTINELS]
            assert sentinels == SENTINELS[: len(sentinels)].tolist(), "sentinels start anew in each document"


@settings(deadline=None)
@given(document_lengths, denoisers, seeds)
def test_spans_are_separated_and_every_document_has_text(lengths: list[int], denoiser: Denoiser, seed: int) -> None:
    text_lengths, span_lengths, documents = draw_document_spans(lengths, denoiser, seed)
    noise, spans = noise_and_spans(sum(lengths), denoiser)
    assert (
        text_lengths.min() >= 1 and span_lengths.min() >= 0 and text_lengths.sum() + span_lengths.sum() == sum(lengths)
    )
    assert span_lengths.sum() == noise and (span_lengths > 0).sum() == spans
    spans_per_document = Counter(documents.tolist())
    assert sorted(spans_per_document) == list(range(len(spans_per_document))), "documents are numbered in order"
    assert all(spans_per_document[document] == 1 for document in documents[span_lengths == 0].tolist())
    document_ends = {int(end) for end in np.cumsum(lengths)}
    assert {
        int((text_lengths + span_lengths)[documents <= document].sum()) for document in spans_per_document
    } <= document_ends


@settings(deadline=None)
@given(st.lists(st.integers(24, 60), min_size=2, max_size=20), st.sampled_from(DENOISERS[:2]), seeds)
def test_documents_with_room_for_span_are_not_merged(lengths: list[int], denoiser: Denoiser, seed: int) -> None:
    text_lengths, span_lengths, documents = draw_document_spans(lengths, denoiser, seed)
    assert [
        int((text_lengths + span_lengths)[documents == document].sum()) for document in range(len(lengths))
    ] == lengths


def test_short_documents_merge_only_without_room() -> None:
    words = random_words(2, "test")
    assert split_noise([30, 1, 1, 30], 9, 3, words)[0].tolist() == [30, 1, 1, 30]
    tokens, noises, counts = split_noise([1] * 20, 3, 1, words)
    assert tokens.tolist() == [4] * 5 and sorted(noises.tolist()) == [0, 0, 0, 0, 3] and counts.sum() == 1
    assert split_noise([1, 1, 9, 1, 1], 8, 4, words)[0].tolist() == [13]
    assert split_noise([3, 9, 2, 3, 8, 1], 12, 6, words)[0].tolist() == [3, 9, 2, 3, 8, 1]


@settings(deadline=None)
@given(document_lengths, denoisers, seeds)
def test_noise_totals_are_exact_and_within_limits(lengths: list[int], denoiser: Denoiser, seed: int) -> None:
    noise, spans = noise_and_spans(sum(lengths), denoiser)
    tokens, noises, counts = split_noise(lengths, noise, spans, random_words(2, seed))
    assert tokens.sum() == sum(lengths) and noises.sum() == noise and counts.sum() == spans
    assert ((counts <= noises) & (counts <= tokens - noises) & ((counts > 0) == (noises > 0))).all()


def test_noise_is_proportional_to_document_length() -> None:
    lengths = [100, 300, 20, 148]
    noises = np.mean([split_noise(lengths, 85, 28, random_words(2, seed))[1] for seed in range(1000)], axis=0)
    assert noises == pytest.approx(85 * np.array(lengths) / sum(lengths), rel=0.06)


def test_compositions_are_uniform() -> None:
    """All ways to write 6 as 3 numbers, and 3 as 2, in one call: each within five standard deviations."""
    samples = [
        tuple(random_compositions(np.array([6, 0, 3]), np.array([3, 0, 2]), random_words(9, "test", seed)).tolist())
        for seed in range(2000)
    ]
    first, second = Counter(sample[:3] for sample in samples), Counter(sample[3:] for sample in samples)
    all_compositions = {tuple(b - a for a, b in pairwise((0, *bounds, 6))) for bounds in combinations(range(1, 6), 2)}
    assert set(first) == all_compositions and set(second) == {(1, 2), (2, 1)}
    assert max(abs(count - 200) for count in first.values()) < 5 * (2000 * 0.1 * 0.9) ** 0.5
    assert abs(second[1, 2] - 1000) < 5 * 500**0.5


def test_text_and_span_lengths_are_independent() -> None:
    """Four tokens of each in two slices: nine ways, each within five standard deviations."""
    counts = Counter(
        (*text_lengths.tolist(), *span_lengths.tolist())
        for text_lengths, span_lengths, _ in (
            draw_document_spans([8], Denoiser("R", 0.5, 2.0), seed) for seed in range(1800)
        )
    )
    assert len(counts) == 9 and max(abs(count - 200) for count in counts.values()) < 5 * (1800 / 9 * 8 / 9) ** 0.5


def test_tokens_are_masked_about_equally_often() -> None:
    """But for the first, which is never in a span, and its neighbours, and the last, which always is."""
    num_masked, lengths = np.zeros(200), Counter[int]()
    for seed in range(1000):
        text_lengths, span_lengths, _ = draw_document_spans([200], DENOISERS[0], seed)
        num_masked += np.repeat(
            np.arange(2 * len(text_lengths)) % 2, np.stack([text_lengths, span_lengths], axis=1).ravel()
        )
        lengths.update(span_lengths.tolist())
    assert num_masked[0] == 0 and num_masked[-1] == 1000
    assert num_masked[40:160] == pytest.approx(150, abs=5 * (1000 * 0.15 * 0.85) ** 0.5)
    assert all(lengths[length] > lengths[length + 1] for length in range(1, 8)), "short spans are the likelier ones"


def test_random_words_match_golden_values() -> None:
    assert random_words(3, "spans", 1234, 5).tolist() == EXPECTED_WORDS
    assert random_words(9, "spans", 1234, 5)[:3].tolist() == EXPECTED_WORDS
    assert len({random_words(1, "spans", seed, index)[0] for seed in range(50) for index in range(50)}) == 2500
    bits = np.unpackbits(random_words(4000, 1).view(np.uint8)).reshape(4000, 64).mean(axis=0)
    assert bits == pytest.approx(0.5, abs=5 * 0.5 / 4000**0.5)


EXPECTED_WORDS = [7816478214595694794, 7652851016722351917, 14035012543475728924]

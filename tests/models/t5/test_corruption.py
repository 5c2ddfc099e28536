"""What cutting spans out of a text must keep, for any text, documents and denoiser."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.permutation import random_words
from megatron.models.t5.data import Pair, Spans, compositions, cut_out, draw_spans, num_words, split_noise
from megatron.models.t5.spans import Denoiser, noise_and_spans, parse_denoisers

SENTINELS = np.arange(99_999, 90_000, -1)
ALL = parse_denoisers("R,X,S", 0.15, 3.0)

denoisers = st.sampled_from([*ALL, *parse_denoisers("R", 0.5, 1.0), *parse_denoisers("R", 0.3, 1.5)])
sizes_of_documents = st.lists(st.integers(1, 60), min_size=1, max_size=30).filter(lambda sizes: sum(sizes) > 1)
seeds = st.integers(0, 2**40)


def draw(sizes: list[int], denoiser: Denoiser, seed: int) -> Spans:
    return draw_spans(sizes, denoiser, random_words(num_words(sum(sizes)), "test", seed))


def text_again(pair: Pair) -> list[int]:
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
@given(sizes_of_documents, denoisers, seeds)
def test_inputs_and_targets_give_back_the_text_and_have_exact_lengths(
    sizes: list[int], denoiser: Denoiser, seed: int
) -> None:
    length = sum(sizes)
    noise, spans = noise_and_spans(length, denoiser)
    text = np.arange(length)
    pair = cut_out(text, draw(sizes, denoiser, seed), SENTINELS)
    assert text_again(pair) == text.tolist()
    assert len(pair.inputs) == length - noise + spans and len(pair.targets) == noise + spans
    for tokens, documents in ((pair.inputs, pair.input_documents), (pair.targets, pair.target_documents)):
        for document in range(len(sizes)):
            names = [t for t in tokens[documents == document].tolist() if t in SENTINELS]
            assert names == SENTINELS[: len(names)].tolist(), "sentinels start anew in each document"


@settings(deadline=None)
@given(sizes_of_documents, denoisers, seeds)
def test_spans_do_not_touch_and_no_document_starts_or_is_left_with_one(
    sizes: list[int], denoiser: Denoiser, seed: int
) -> None:
    kept, cut, documents = draw(sizes, denoiser, seed)
    noise, spans = noise_and_spans(sum(sizes), denoiser)
    assert kept.min() >= 1 and cut.min() >= 0 and kept.sum() + cut.sum() == sum(sizes)
    assert cut.sum() == noise and (cut > 0).sum() == spans
    pieces = Counter(documents.tolist())
    assert sorted(pieces) == list(range(len(pieces))), "documents are numbered in order"
    assert all(pieces[document] == 1 for document in documents[cut == 0].tolist())
    ends = {int(end) for end in np.cumsum(sizes)}
    assert {int((kept + cut)[documents <= document].sum()) for document in pieces} <= ends


@settings(deadline=None)
@given(st.lists(st.integers(24, 60), min_size=2, max_size=20), st.sampled_from(ALL[:2]), seeds)
def test_documents_with_room_for_a_span_stay_apart(sizes: list[int], denoiser: Denoiser, seed: int) -> None:
    kept, cut, documents = draw(sizes, denoiser, seed)
    assert [int((kept + cut)[documents == document].sum()) for document in range(len(sizes))] == sizes


def test_short_documents_join_their_neighbours_only_where_there_is_no_room() -> None:
    words = random_words(2, "test")
    assert split_noise([30, 1, 1, 30], 9, 3, words)[0].tolist() == [30, 1, 1, 30]
    tokens, noises, counts = split_noise([1] * 20, 3, 1, words)
    assert tokens.tolist() == [4] * 5 and sorted(noises.tolist()) == [0, 0, 0, 0, 3] and counts.sum() == 1
    assert split_noise([1, 1, 9, 1, 1], 8, 4, words)[0].tolist() == [13]
    assert split_noise([3, 9, 2, 3, 8, 1], 12, 6, words)[0].tolist() == [3, 9, 2, 3, 8, 1]


@settings(deadline=None)
@given(sizes_of_documents, denoisers, seeds)
def test_totals_are_exact_and_nothing_has_more_than_its_room(sizes: list[int], denoiser: Denoiser, seed: int) -> None:
    noise, spans = noise_and_spans(sum(sizes), denoiser)
    tokens, noises, counts = split_noise(sizes, noise, spans, random_words(2, seed))
    assert tokens.sum() == sum(sizes) and noises.sum() == noise and counts.sum() == spans
    assert ((counts <= noises) & (counts <= tokens - noises) & ((counts > 0) == (noises > 0))).all()


def test_documents_get_their_share_by_length() -> None:
    sizes = [100, 300, 20, 148]
    noises = np.mean([split_noise(sizes, 85, 28, random_words(2, seed))[1] for seed in range(1000)], axis=0)
    assert noises == pytest.approx(85 * np.array(sizes) / sum(sizes), rel=0.06)


def test_compositions_are_uniform() -> None:
    """All ways to write 6 as 3 numbers, and 3 as 2, in one call: each within five standard deviations."""
    ways = [
        tuple(compositions(np.array([6, 0, 3]), np.array([3, 0, 2]), random_words(9, "test", seed)).tolist())
        for seed in range(2000)
    ]
    first, second = Counter(way[:3] for way in ways), Counter(way[3:] for way in ways)
    every = {tuple(b - a for a, b in pairwise((0, *cuts, 6))) for cuts in combinations(range(1, 6), 2)}
    assert set(first) == every and set(second) == {(1, 2), (2, 1)}
    assert max(abs(count - 200) for count in first.values()) < 5 * (2000 * 0.1 * 0.9) ** 0.5
    assert abs(second[1, 2] - 1000) < 5 * 500**0.5


def test_what_is_kept_and_what_is_cut_out_are_independent() -> None:
    """Four tokens of each in two pieces: nine ways, each within five standard deviations."""
    ways = Counter(
        (*kept.tolist(), *cut.tolist())
        for kept, cut, _ in (draw([8], Denoiser("R", 0.5, 2.0), seed) for seed in range(1800))
    )
    assert len(ways) == 9 and max(abs(count - 200) for count in ways.values()) < 5 * (1800 / 9 * 8 / 9) ** 0.5


def test_every_token_is_cut_out_about_equally_often() -> None:
    """But for the first, which is never in a span, and its neighbours, and the last, which always is."""
    often, lengths = np.zeros(200), Counter[int]()
    for seed in range(1000):
        kept, cut, _ = draw([200], ALL[0], seed)
        often += np.repeat(np.arange(2 * len(kept)) % 2, np.stack([kept, cut], axis=1).ravel())
        lengths.update(cut.tolist())
    assert often[0] == 0 and often[-1] == 1000
    assert often[40:160] == pytest.approx(150, abs=5 * (1000 * 0.15 * 0.85) ** 0.5)
    assert all(lengths[short] > lengths[short + 1] for short in range(1, 8)), "short spans are the likelier ones"


def test_random_words_follow_from_their_key_alone_for_ever() -> None:
    assert random_words(3, "spans", 1234, 5).tolist() == FIXED
    assert random_words(9, "spans", 1234, 5)[:3].tolist() == FIXED
    assert len({random_words(1, "spans", seed, index)[0] for seed in range(50) for index in range(50)}) == 2500
    bits = np.unpackbits(random_words(4000, 1).view(np.uint8)).reshape(4000, 64).mean(axis=0)
    assert bits == pytest.approx(0.5, abs=5 * 0.5 / 4000**0.5)


FIXED = [7816478214595694794, 7652851016722351917, 14035012543475728924]

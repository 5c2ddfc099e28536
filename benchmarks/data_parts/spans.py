"""Cutting T5's spans out of a text: our arrays against plain Python.

| contender | what it does |
|---|---|
| ours | what ``T5Dataset`` does behind the reading: random words, spans, sentinels, frames |
| the usual loop | the steps of Megatron's T5 data set, as told below |
| the same in Python | exactly ours, to the last bit, without arrays: what a careful loop can reach |

The usual loop lists spans of each length from each token on, shuffles the lists, takes one of each with a length drawn
from a geometric distribution unless it overlaps those taken before, and then goes through the text span by span.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.data_parts.rounds import Bar, ratio_quartiles, take_turns
from megatron.data.permutation import random_words
from megatron.models.t5 import data, spans
from megatron.models.t5.data import T5Tokens, cut_out, draw_spans, num_words
from megatron.models.t5.spans import Denoiser

OURS, USUAL, SAME = "spans, ours", "spans, the usual loop", "spans, the same in Python"
DENOISER = Denoiser("R", 0.15, 3.0)
ENC_SEQ_LENGTH = 512
LONGEST_SPAN = 10
_WORD = (1 << 64) - 1

Sample = dict[str, np.ndarray]
Cut = Callable[[np.ndarray, int], Sample]


def measure(samples: int, rounds: int) -> tuple[dict[str, list[float]], list[Bar]]:
    """Return samples/s of each contender in each round, and the bar; ``samples`` a turn."""
    text = np.random.default_rng(0).integers(0, TOKENS.text_vocab_size, RAW_LENGTH)

    def turn(cut: Cut) -> float:
        started = time.perf_counter()
        for number in range(samples):
            cut(text, number)
        return samples / (time.perf_counter() - started)

    rates = take_turns({name: partial(turn, cut) for name, cut in CONTENDERS.items()}, rounds)
    return rates, [Bar("T5 spans / the usual loop", 10.0, ratio_quartiles(rates[OURS], rates[USUAL]))]


TOKENS = T5Tokens.appended(32_000, 100, 1)
RAW_LENGTH = spans.raw_length(ENC_SEQ_LENGTH, [DENOISER])
TARGET_LENGTH = spans.longest_target(RAW_LENGTH, [DENOISER])
_SENTINELS = np.array(TOKENS.sentinels, np.int64)


def ours(text: np.ndarray, number: int) -> Sample:
    """Return the sample as ``T5Dataset`` makes it of a text that it has read."""
    words = random_words(num_words(len(text)) + 1, "spans", 0, number)
    pair = cut_out(text, draw_spans([len(text)], DENOISER, words), _SENTINELS)
    return data.sample(pair, TOKENS, ENC_SEQ_LENGTH, TARGET_LENGTH)


def same(text: np.ndarray, number: int) -> Sample:
    """Return the very sample of ``ours``, one Python number after the other."""
    words = _words(num_words(len(text)) + 1, "spans", 0, number)[num_words(0) :]
    noise, count = spans.noise_and_spans(len(text), DENOISER)
    kept = _composition(len(text) - noise, count, words[noise : len(text)])
    cut = _composition(noise, count, words[:noise])
    inputs, targets, place = [], [], 0
    for span in range(count):
        for _ in range(kept[span]):
            inputs.append(int(text[place]))
            place += 1
        inputs.append(TOKENS.sentinels[span])
        targets.append(TOKENS.sentinels[span])
        for _ in range(cut[span]):
            targets.append(int(text[place]))
            place += 1
    return _framed(inputs, targets)


def _words(count: int, *key: int | str) -> list[int]:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    start, step = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little") | 1
    words = []
    for place in range(count):
        word = (start + place * step) & _WORD
        word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _WORD
        word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _WORD
        words.append(word ^ word >> 31)
    return words


def _composition(total: int, parts: int, words: list[int]) -> list[int]:
    """Split ``total`` into ``parts``: the places with the smallest keys are where parts start."""
    bits = total.bit_length()
    keys = sorted((words[place] >> 1 >> bits << bits) | place for place in range(1, total))
    starts = [0, *sorted(key & ((1 << bits) - 1) for key in keys[: parts - 1]), total]
    return [after - before for before, after in zip(starts, starts[1:], strict=False)]


def usual(text: np.ndarray, number: int) -> Sample:
    """Return a sample of about as many spans by the usual loop; their number differs from sample to sample."""
    random = np.random.RandomState(number)
    tokens = [int(token) for token in text]
    noise = max(1, round(len(tokens) * DENOISER.noise_density))
    candidates = [
        [[*range(start, start + length)] for length in range(1, LONGEST_SPAN + 1) if start + length <= len(tokens)]
        for start in range(len(tokens))
    ]
    random.shuffle(candidates)
    covered: set[int] = set()
    chosen = []
    for lengths in candidates:
        if len(covered) >= noise:
            break
        length = min(int(random.geometric(1 / DENOISER.mean_span_length)), len(lengths), noise - len(covered))
        span = lengths[length - 1]
        if len(chosen) + 1 < len(TOKENS.sentinels) and not any(place in covered for place in span):
            covered.update(span)
            chosen.append(span)
    chosen.sort(key=lambda span: span[0])
    inputs, targets, place = [], [], 0
    for sentinel, span in zip(TOKENS.sentinels, chosen, strict=False):
        inputs.extend(tokens[place : span[0]])
        inputs.append(sentinel)
        targets.append(sentinel)
        targets.extend(tokens[place] for place in span)
        place = span[-1] + 1
    inputs.extend(tokens[place:])
    return _framed(inputs, targets)


def _framed(inputs: list[int], targets: list[int]) -> Sample:
    sample = {}
    for name, side, row, length in (
        ("inputs", "enc", inputs, ENC_SEQ_LENGTH),
        ("targets", "dec", targets, TARGET_LENGTH),
    ):
        row = [*row[: length - 1], TOKENS.eos_id]
        padding = length - len(row)
        sample[name] = np.array(row + [TOKENS.pad_id] * padding, np.int64)
        sample[f"{side}_segments"] = np.array([0] * len(row) + [data.PADDING] * padding, np.int32)
    return sample


CONTENDERS: dict[str, Cut] = {OURS: ours, USUAL: usual, SAME: same}

"""Lengths of T5's inputs and targets.

Span corruption removes ``noise`` tokens in ``spans`` spans from a text of ``length`` tokens and replaces each span by a
sentinel:

| sequence | contents | tokens |
|---|---|---|
| inputs | remaining text, a sentinel for each span, end of sample | length - noise + spans + 1 |
| targets | for each span its sentinel and its tokens, end of sample | noise + spans + 1 |

With several denoisers, the inputs start with an additional token that identifies the denoiser: the mode token.

    noise = round(noise_density * length)        at least 1, at most length - 1
    spans = round(noise / mean_span_length)      at least 1, at most min(noise, length - noise)

Halves are rounded to even. Each length changes by 0 or 1 when the text grows by 1, so that a single denoiser can fill
any input length exactly. For example, a text of 568 tokens leads to 512 inputs and 114 targets.

| denoiser | noise density | mean span length | task |
|---|---|---|---|
| R | --noise-density | --mean-span-length | short spans, the original T5 objective |
| X | 0.5 | 8 | half of the text |
| S | 0.25 | one span | predict the last quarter from the first three |

Sources: Raffel et al. 2020, "Exploring the limits of transfer learning with a unified text-to-text transformer",
section 3.1.4 (lengths as in seqio); Tay et al. 2022, "UL2: unifying language learning paradigms", section 3.1.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

DENOISER_NAMES = ("R", "X", "S")
MIN_TEXT_LENGTH = 2
"""A span needs one token, and one token before it."""


@dataclass(frozen=True)
class Denoiser:
    """A denoising task: how spans are cut out of a text. ``weight`` is its relative sample share."""

    kind: str
    noise_density: float
    mean_span_length: float
    weight: float = 1.0


def parse_denoisers(text: str, noise_density: float, mean_span_length: float) -> tuple[Denoiser, ...]:
    """Parse ``--denoisers``, such as "R", "R,X,S" or "R:2,X:1,S:1" with weights.

    Raises:
        ValueError: the text is malformed, or R's density and span length leave no room for spans.
    """
    weights = _parse_weights(text)
    shapes = {"R": (noise_density, mean_span_length), "X": (0.5, 8.0), "S": (0.25, math.inf)}
    if "R" in weights:
        _check_shape(noise_density, mean_span_length)
    return tuple(Denoiser(name, *shapes[name], weight) for name, weight in weights.items())


def has_modes(denoisers: Sequence[Denoiser]) -> bool:
    """Return True if inputs start with a mode token, which is the case with several denoisers."""
    return len(denoisers) > 1


def noise_and_spans(length: int, denoiser: Denoiser) -> tuple[int, int]:
    """Count the tokens removed from a text of ``length`` tokens, and the spans."""
    if length < MIN_TEXT_LENGTH:
        raise ValueError(f"a text must have at least {MIN_TEXT_LENGTH} tokens for span corruption, got {length}")
    num_noise = min(max(round(denoiser.noise_density * length), 1), length - 1)
    num_spans = max(min(round(num_noise / denoiser.mean_span_length), num_noise, length - num_noise), 1)
    return num_noise, num_spans


def input_length(length: int, denoiser: Denoiser, has_mode: bool = False) -> int:
    """Return the encoder token count for a text of ``length`` tokens."""
    num_noise, num_spans = noise_and_spans(length, denoiser)
    return length - num_noise + num_spans + 1 + has_mode


def target_length(length: int, denoiser: Denoiser) -> int:
    """Return the decoder token count for a text of ``length`` tokens."""
    return sum(noise_and_spans(length, denoiser)) + 1


def raw_length(enc_seq_length: int, denoisers: Sequence[Denoiser]) -> int:
    """Return the largest text length whose inputs fit ``enc_seq_length`` with every denoiser.

    With one denoiser, inputs fill ``enc_seq_length``; with several, shorter inputs are padded.

    Raises:
        ValueError: no text is short enough, or a single denoiser cannot fill the length exactly (spans of about one
            token, with close to the maximum noise).
    """

    def longest_input(text_length: int) -> int:
        return max(input_length(text_length, denoiser, has_modes(denoisers)) for denoiser in denoisers)

    if longest_input(MIN_TEXT_LENGTH) > enc_seq_length:
        raise ValueError(
            f"--enc-seq-length must be at least {longest_input(MIN_TEXT_LENGTH)}, the inputs of a text of "
            f"{MIN_TEXT_LENGTH} tokens, got {enc_seq_length}. Raise it."
        )
    max_density = max(denoiser.noise_density for denoiser in denoisers)
    upper_bound = math.ceil((enc_seq_length + 1) / (1 - max_density)) + MIN_TEXT_LENGTH
    length = bisect_right(range(upper_bound), enc_seq_length, lo=MIN_TEXT_LENGTH, key=longest_input) - 1
    if len(denoisers) == 1 and longest_input(length) < enc_seq_length:
        raise ValueError(
            f"--enc-seq-length must be a length that inputs can have, got {enc_seq_length}: with --noise-density "
            f"{denoisers[0].noise_density:g} and --mean-span-length {denoisers[0].mean_span_length:g}, inputs have "
            f"{longest_input(length)} or {longest_input(length + 1)} tokens. Use one of these lengths, or raise "
            "--mean-span-length."
        )
    return length


def max_target_length(length: int, denoisers: Sequence[Denoiser]) -> int:
    """Return the longest target's length for a text of ``length`` tokens: the minimum of ``--dec-seq-length``."""
    return max(target_length(length, denoiser) for denoiser in denoisers)


def max_num_spans(length: int, denoisers: Sequence[Denoiser]) -> int:
    """Return the maximum span count in a text of ``length`` tokens, which is the number of sentinels required."""
    return max(noise_and_spans(length, denoiser)[1] for denoiser in denoisers)


def _parse_weights(text: str) -> dict[str, float]:
    usage = (
        f"--denoisers must be a list of {', '.join(DENOISER_NAMES)}, each at most once, with optional weights: "
        "R:2,X:1,S:1"
    )
    weights: dict[str, float] = {}
    for entry in text.split(","):
        name, colon, weight_text = (word.strip() for word in entry.partition(":"))
        if name not in DENOISER_NAMES:
            raise ValueError(f"{usage}; got {entry.strip()!r} in {text!r}")
        if name in weights:
            raise ValueError(f"{usage}; got {name} twice in {text!r}")
        weights[name] = _parse_weight(weight_text, f"{usage}; got {entry.strip()!r} in {text!r}") if colon else 1.0
    return weights


def _parse_weight(weight_text: str, problem: str) -> float:
    try:
        weight = float(weight_text)
    except ValueError as error:
        raise ValueError(f"{problem}, whose weight is not a number") from error
    if not 0 < weight < math.inf:
        raise ValueError(f"{problem}, whose weight must be above 0 and finite. Remove the denoisers that are not used")
    return weight


def _check_shape(noise_density: float, mean_span_length: float) -> None:
    if not 0 < noise_density < 1:
        raise ValueError(f"--noise-density must be between 0 and 1, got {noise_density:g}. T5 uses 0.15")
    if not 1 <= mean_span_length < math.inf:
        raise ValueError(f"--mean-span-length must be at least 1 and finite, got {mean_span_length:g}. T5 uses 3")
    if noise_density / mean_span_length > 1 - noise_density:
        raise ValueError(
            "spans need at least one text token between them: --noise-density / --mean-span-length must be at most "
            f"1 - --noise-density, got {noise_density:g} / {mean_span_length:g} and {1 - noise_density:g}. "
            "Lower --noise-density or raise --mean-span-length."
        )

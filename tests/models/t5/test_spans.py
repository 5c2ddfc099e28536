from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.models.t5.spans import (
    Denoiser,
    has_modes,
    input_length,
    max_num_spans,
    max_target_length,
    noise_and_spans,
    parse_denoisers,
    raw_length,
    target_length,
)

R = Denoiser("R", 0.15, 3.0)
X = Denoiser("X", 0.5, 8.0)
S = Denoiser("S", 0.25, math.inf)
DENOISERS = (R, X, S)

mixtures = st.lists(st.sampled_from(DENOISERS), min_size=1, max_size=3, unique=True)


@pytest.mark.parametrize(
    "inputs, length, targets, num_spans", [(512, 568, 114, 28), (1024, 1137, 229, 57), (2048, 2274, 456, 114)]
)
def test_lengths_match_t5(inputs: int, length: int, targets: int, num_spans: int) -> None:
    assert raw_length(inputs, [R]) == length
    assert input_length(length, R) == inputs and target_length(length, R) == max_target_length(length, [R]) == targets
    assert noise_and_spans(length, R)[1] == max_num_spans(length, [R]) == num_spans


@settings(deadline=None)
@given(st.integers(2, 10_000), st.sampled_from(DENOISERS))
def test_every_span_has_noise_and_token_before_it(length: int, denoiser: Denoiser) -> None:
    noise, num_spans = noise_and_spans(length, denoiser)
    assert 1 <= num_spans <= min(noise, length - noise)
    assert input_length(length, denoiser) + target_length(length, denoiser) == length + 2 * num_spans + 2
    assert input_length(length, denoiser, True) == input_length(length, denoiser) + 1
    if length > 100:
        assert noise == pytest.approx(denoiser.noise_density * length, abs=1)
        assert denoiser.kind == "S" or noise / num_spans == pytest.approx(denoiser.mean_span_length, rel=0.25)
    assert denoiser.kind != "S" or num_spans == 1


@settings(deadline=None)
@given(st.integers(3, 5000), st.sampled_from(DENOISERS))
def test_single_denoiser_fills_any_input_length(inputs: int, denoiser: Denoiser) -> None:
    length = raw_length(inputs, [denoiser])
    assert input_length(length, denoiser) == inputs < input_length(length + 1, denoiser)


@settings(deadline=None)
@given(st.integers(4, 5000), mixtures)
def test_raw_length_is_largest_that_fits_all_denoisers(inputs: int, denoisers: list[Denoiser]) -> None:
    length, has_mode = raw_length(inputs, denoisers), has_modes(denoisers)
    assert max(input_length(length, d, has_mode) for d in denoisers) <= inputs
    assert max(input_length(length + 1, d, has_mode) for d in denoisers) > inputs
    assert max_target_length(length, denoisers) == max(target_length(length, d) for d in denoisers)
    assert max_num_spans(length, denoisers) == max(noise_and_spans(length, d)[1] for d in denoisers)


@settings(deadline=None)
@given(st.integers(3, 2000), st.floats(0.01, 0.99), st.floats(1, 50))
def test_unfillable_input_length_raises_with_flags(inputs: int, density: float, mean: float) -> None:
    try:
        denoisers = parse_denoisers("R", density, mean)
        length = raw_length(inputs, denoisers)
    except ValueError as error:
        assert "--noise-density" in str(error) and "--mean-span-length" in str(error)
        return
    assert input_length(length, denoisers[0]) == inputs


def test_unfillable_length_error_names_nearest_lengths() -> None:
    denoisers = parse_denoisers("R", 0.5, 1.0)
    assert [raw_length(inputs, denoisers) for inputs in (7, 9)] == [7, 8]
    with pytest.raises(
        ValueError, match="--enc-seq-length must .* got 8: .* 0.5 and --mean-span-length 1, inputs have 7 or 9"
    ):
        raw_length(8, denoisers)


@pytest.mark.parametrize("denoisers, smallest", [([R], 3), (DENOISERS, 4)])
def test_rejects_inputs_without_room_for_span(denoisers: list[Denoiser], smallest: int) -> None:
    assert raw_length(smallest, denoisers) >= 2
    with pytest.raises(ValueError, match=f"--enc-seq-length must be at least {smallest}, .* got {smallest - 1}"):
        raw_length(smallest - 1, denoisers)
    with pytest.raises(ValueError, match="at least 2 tokens .* got 1"):
        noise_and_spans(1, R)


def test_parses_denoiser_mixtures() -> None:
    assert parse_denoisers("R", 0.2, 4) == (Denoiser("R", 0.2, 4, 1.0),)
    assert parse_denoisers("R,X,S", 0.15, 3.0) == DENOISERS and has_modes(DENOISERS) and not has_modes([X])
    assert [d.weight for d in parse_denoisers(" S:0.5, R : 2,X", 0.15, 3.0)] == [0.5, 2.0, 1.0]
    assert parse_denoisers("S", 7, -1) == (S,)  # R's two numbers act on R alone


@pytest.mark.parametrize(
    "text, density, mean, message",
    [
        ("", 0.15, 3, "--denoisers must be a list of R, X, S.*got '' in ''"),
        ("R,Y", 0.15, 3, "got 'Y' in 'R,Y'"),
        ("R,X,R", 0.15, 3, "got R twice"),
        ("R:", 0.15, 3, "got 'R:' in 'R:', whose weight is not a number"),
        ("R:0", 0.15, 3, "weight must be above 0"),
        ("R:nan", 0.15, 3, "weight must be above 0"),
        ("R:inf", 0.15, 3, "weight must be above 0"),
        ("R", 0.0, 3, "--noise-density must be between 0 and 1, got 0"),
        ("R", 1.0, 3, "--noise-density must be between 0 and 1, got 1"),
        ("R", math.nan, 3, "--noise-density must be between 0 and 1, got nan"),
        ("R", 0.15, 0.5, "--mean-span-length must be at least 1 and finite, got 0.5"),
        ("R", 0.15, math.inf, "--mean-span-length must be at least 1 and finite, got inf"),
        ("R", 0.9, 3, "must be at most 1 - --noise-density, got 0.9 / 3 and 0.1"),
    ],
)
def test_rejects_invalid_denoisers(text: str, density: float, mean: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_denoisers(text, density, mean)

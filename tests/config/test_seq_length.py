"""The length of a step as a function of the tokens consumed, and every schedule that cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import Config, parse
from megatron.config.seq_length import SeqLengths, parse_lengths
from megatron.errors import ConfigError

FLAG = "--seq-length-schedule"


def parse_schedule(schedule: str, extra: str = "", *, family: str = "gpt2", world_size: int = 1) -> Config:
    words = [*f"--data-path none --seq-length 64 --dry-run {extra}".split(), FLAG, schedule]
    return parse(words, world_size=world_size, env={}, family=family)


def test_step_uses_length_of_last_reached_entry() -> None:
    lengths = SeqLengths(64, parse_lengths("0: 16; 1e3: 32 ;2_000: 64".replace("_", "")))
    assert lengths.steps == ((0, 16), (1000, 32), (2000, 64)) and lengths.all() == [16, 32, 64]
    assert [lengths.at(tokens) for tokens in (0, 999, 1000, 1999, 2000, 10**15)] == [16, 16, 32, 32, 64, 64]
    assert [lengths.length_of_step(samples, 0) for samples in (0, 15, 16, 31, 32)] == [16, 16, 32, 32, 64]
    assert lengths.starts() == [(0, 0, 16), (1000, 16, 32), (2000, 32, 64)] and lengths.is_changing


@pytest.mark.parametrize("schedule", [None, "0: 64"])
def test_single_length_equals_no_schedule(schedule: str | None) -> None:
    lengths = Config().batch.seq_lengths if schedule is None else parse_schedule(schedule).batch.seq_lengths
    assert lengths.all() == [lengths.full] and not lengths.is_changing
    assert {lengths.at(tokens) for tokens in (0, 5, 10**12)} == {lengths.full}


@given(st.lists(st.integers(1, 10**9), min_size=0, max_size=5, unique=True), st.integers(0, 10**9))
def test_length_never_decreases(tokens: list[int], num_tokens: int) -> None:
    steps = tuple(zip([0, *sorted(tokens)], (2**n for n in range(6)), strict=False))
    lengths = SeqLengths(steps[-1][1], steps)
    assert lengths.at(num_tokens) == max(length for start, length in steps if start <= num_tokens)
    assert lengths.at(num_tokens) <= lengths.at(num_tokens + 1)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (" ; ", "which has no entry"),
        ("0 16", "'0 16' has no colon"),
        ("x: 16", "'x' is not a whole number of tokens"),
        ("-1: 16", "'-1' is not a whole number of tokens"),
        ("0.5: 16", "'0.5' is not a whole number of tokens"),
        ("1e30: 16", "'1e30' is not a whole number of tokens"),
        ("nan: 16", "'nan' is not a whole number"),
        ("0: ", "'' is not a length"),
        ("0: 0; 1e3: 64", "'0' is not a length"),
        ("0: 16 32", "'16 32' is not a length"),
        ("0: 64x", "'64x' is not a length"),
    ],
)
def test_invalid_schedule_text_raises(schedule: str, message: str) -> None:
    with pytest.raises(ConfigError, match='must be entries "TOKENS: LENGTH"') as exc_info:
        parse_schedule(schedule)
    assert message in str(exc_info.value) and FLAG in str(exc_info.value)


@pytest.mark.parametrize(
    ("schedule", "extra", "message"),
    [
        ("5: 16; 1e3: 64", "", "must start at 0 tokens, got 5 tokens in its first entry. Start with 0: 16"),
        ("0: 16; 9: 32; 9: 64", "", "must increase, got 9 after 9"),
        ("0: 16; 9: 32; 8: 64", "", "must increase, got 8 after 9"),
        ("0: 32; 9: 16; 10: 64", "", "lengths of --seq-length-schedule must increase, got 16 after 32"),
        ("0: 32; 9: 32; 10: 64", "", "must increase, got 32 after 32"),
        ("0: 24; 9: 64", "", "must divide --seq-length, so that a sample is split into equal chunks, got 24 and 64"),
        (
            "0: 16; 9: 32",
            "",
            'must be --seq-length, got 32 and 64. Add a last entry "TOKENS: 64", or use --seq-length 32',
        ),
        ("0: 16; 9: 128", "", "may exceed --seq-length, the length of a sample, got 128 and 64"),
        ("0: 2; 9: 64", "--context-parallel-size 2", "must be a multiple of 2 x --context-parallel-size = 4, got 2"),
        (
            "0: 4; 9: 64",
            "--context-parallel-size 2 --model-parallel-size 2 --sequence-parallel",
            "multiple of 2 x --context-parallel-size x --model-parallel-size = 8, got 4",
        ),
        ("0: 1; 9: 64", "--model-parallel-size 2 --sequence-parallel", "multiple of --model-parallel-size = 2"),
        ("0: 16; 9: 64", "--eval-only --load x", "--seq-length-schedule applies to training only, got --eval-only"),
    ],
)
def test_invalid_schedule_error_has_fix(schedule: str, extra: str, message: str) -> None:
    with pytest.raises(ConfigError) as exc_info:
        parse_schedule(schedule, extra, world_size=4)
    assert message in str(exc_info.value)


def test_schedule_problems_are_reported_with_other_problems() -> None:
    with pytest.raises(ConfigError, match="6 problems") as exc_info:
        parse_schedule("7: 32; 3: 24; 9: 32", "--hidden-size 30 --num-attention-heads 4", world_size=1)
    text = str(exc_info.value)
    assert all(
        fragment in text
        for fragment in ("start at 0 tokens", "tokens of", "lengths of", "must divide", "last length", "hidden")
    )


@pytest.mark.parametrize("family", ["t5", "bert"])
def test_seq_length_schedule_raises_for_t5_and_bert(family: str) -> None:
    with pytest.raises(ConfigError, match="full length, which cannot be split"):
        parse(["--data-path", "none", FLAG, "0: 8; 9: 512"], world_size=1, env={}, family=family)


@pytest.mark.parametrize(
    ("schedule", "steps", "expected_length"), [("0: 16; 1023: 32; 1024: 64", 4, "64"), ("0: 16; 1023: 64", 5, "")]
)
def test_unreached_lengths_are_noted(schedule: str, steps: int, expected_length: str) -> None:
    """A step is 4 samples of 64 tokens: the fourth begins after 768, and 1,023 tokens lie within it."""
    notes = parse_schedule(schedule, f"--batch-size 4 --train-iters {steps}").notes
    schedule_notes = [note for note in notes if FLAG in note]
    assert [f"ends after {256 * steps} tokens" in note for note in schedule_notes] == [True] * len(schedule_notes)
    assert bool(schedule_notes) == bool(expected_length) and all(
        f"the lengths 32, {expected_length} have" in note for note in schedule_notes
    )

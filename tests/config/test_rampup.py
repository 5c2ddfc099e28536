"""The size of a step as a function of the samples consumed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.batch_rampup import BatchSizes, parse_rampup, parse_schedule


def list_step_sizes(batch_sizes: BatchSizes, steps: int) -> list[int]:
    """Return the size of each step, one after another."""
    step_sizes, consumed = [], 0
    for _ in range(steps):
        step_sizes.append(batch_sizes.at(consumed))
        consumed += step_sizes[-1]
    return step_sizes


def test_batch_grows_by_increments() -> None:
    batch_sizes = parse_rampup("4 2 24", 10)
    assert batch_sizes.all() == [4, 6, 8, 10]
    # 8 samples with each size: 4 + 4, then 6 + 6 (8..20), then 8 (20..28), then the whole batch
    assert list_step_sizes(batch_sizes, 7) == [4, 4, 6, 6, 8, 10, 10]
    assert [batch_sizes.at(c) for c in (0, 7, 8, 15, 16, 23, 24, 10**12)] == [4, 4, 6, 6, 8, 8, 10, 10]


def test_batch_is_constant_without_rampup() -> None:
    batch_sizes = BatchSizes(12)
    assert batch_sizes.all() == [12] and list_step_sizes(batch_sizes, 3) == [12] * 3
    assert batch_sizes.consumed_after(5, 7) == 67


@settings(max_examples=60)
@given(
    start=st.integers(1, 9), increment=st.integers(1, 7), n=st.integers(1, 6), samples=st.integers(1, 300),
    first=st.integers(0, 20), steps=st.integers(0, 60),
)  # fmt: skip
def test_consumed_after_matches_step_by_step_sum(
    start: int, increment: int, n: int, samples: int, first: int, steps: int
) -> None:
    batch_sizes = BatchSizes.ramp(start + n * increment, start, increment, samples)
    consumed = sum(list_step_sizes(batch_sizes, first))
    assert batch_sizes.consumed_after(steps, consumed) == sum(list_step_sizes(batch_sizes, first + steps))
    assert set(list_step_sizes(batch_sizes, first + steps)) <= set(batch_sizes.all())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4 2", "must be START INCREMENT SAMPLES"),
        ("4 2 x", "must be START INCREMENT SAMPLES"),
        ("4 0 8", "must be START INCREMENT SAMPLES"),
        ("4 2 -8", "must be START INCREMENT SAMPLES"),
        ("10 2 8", "must start below the global batch"),
        ("4 4 8", "10 - 4 = 6, which is not a multiple of the increment 4"),
    ],
)
def test_invalid_rampup_raises(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="--rampup-batch-size") as exc_info:
        parse_rampup(text, 10)
    assert message in str(exc_info.value)


def test_scheduled_batch_changes_at_token_counts() -> None:
    batch_sizes = parse_schedule("0:4, 0.1K:6 200:1e1", 10, 8)  # from samples 0, 12 and 25
    assert batch_sizes == BatchSizes(10, ((0, 4), (12, 6)), 25)
    assert list_step_sizes(batch_sizes, 7) == [4, 4, 4, 6, 6, 6, 10]
    assert batch_sizes.consumed_after(6) == 30 and batch_sizes.steps_until(31) == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be TOKENS:SAMPLES entries"),
        ("0:4 100", "must be TOKENS:SAMPLES entries"),
        ("0:4 100:x", "must be TOKENS:SAMPLES entries"),
        ("0:4 1/0:8", "must be TOKENS:SAMPLES entries"),
        ("8:4 100:10", "the first from 0"),
        ("0:4 100:2 200:10", "with increasing numbers"),
        ("0:4 4:10", "must use every size for at least one sample of 8 tokens"),
        ("0:4 100:8", "must end with the global batch, got 8 samples and a global batch of 10"),
    ],
)
def test_invalid_schedule_raises(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="--step-batch-size-schedule") as exc_info:
        parse_schedule(text, 10, 8)
    assert message in str(exc_info.value)

"""The size of a step as a function of the samples consumed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.batch_rampup import BatchSizes, parse_rampup


def walk(sizes: BatchSizes, steps: int) -> list[int]:
    """Return the size of each step, one after another."""
    found, consumed = [], 0
    for _ in range(steps):
        found.append(sizes.at(consumed))
        consumed += found[-1]
    return found


def test_the_batch_grows_by_increments_until_the_samples_are_reached() -> None:
    sizes = parse_rampup("4 2 24", 10)
    assert sizes.all() == [4, 6, 8, 10]
    # 8 samples with each size: 4 + 4, then 6 + 6 (8..20), then 8 (20..28), then the whole batch
    assert walk(sizes, 7) == [4, 4, 6, 6, 8, 10, 10]
    assert [sizes.at(c) for c in (0, 7, 8, 15, 16, 23, 24, 10**12)] == [4, 4, 6, 6, 8, 8, 10, 10]


def test_without_a_ramp_every_step_is_whole() -> None:
    sizes = BatchSizes(12)
    assert sizes.all() == [12] and walk(sizes, 3) == [12] * 3
    assert sizes.consumed_after(5, 7) == 67


@settings(max_examples=60)
@given(
    start=st.integers(1, 9), increment=st.integers(1, 7), n=st.integers(1, 6), samples=st.integers(1, 300),
    first=st.integers(0, 20), steps=st.integers(0, 60),
)  # fmt: skip
def test_samples_after_many_steps_are_those_of_single_steps(
    start: int, increment: int, n: int, samples: int, first: int, steps: int
) -> None:
    sizes = BatchSizes(start + n * increment, start, increment, samples)
    consumed = sum(walk(sizes, first))
    assert sizes.consumed_after(steps, consumed) == sum(walk(sizes, first + steps))
    assert set(walk(sizes, first + steps)) <= set(sizes.all())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4 2", "must be START INCREMENT SAMPLES"),
        ("4 2 x", "must be START INCREMENT SAMPLES"),
        ("4 0 8", "must be START INCREMENT SAMPLES"),
        ("4 2 -8", "must be START INCREMENT SAMPLES"),
        ("10 2 8", "must start below the global batch"),
        ("4 4 8", "10 - 4 = 6, which is not a multiple of the increment 4"),
    ],
)
def test_a_ramp_that_cannot_be_is_told(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="--rampup-batch-size") as raised:
        parse_rampup(text, 10)
    assert said in str(raised.value)

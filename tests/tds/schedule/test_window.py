"""A sender's limit never stops a schedule that would run without one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tds.schedule import (
    Action,
    ScheduleError,
    forward_only,
    gpipe,
    one_forward_one_backward,
    schedule_named,
    validate,
)
from tds.schedule.limits import send_window
from tests.helpers.harness import run_ranks
from tests.helpers.lines import check, chunk_by_chunk, drive, make_exchange, micro_batch


def _mixed(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
    """Stage 0 runs all forwards first, which the others' 1F1B lets it."""
    return (gpipe if stage == 0 else one_forward_one_backward)(num_stages, num_micro_batches, stage)


def _two_chunks(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
    return chunk_by_chunk(num_micro_batches, 2)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 40), st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
def test_one_more_than_the_stages_is_enough_for_the_named_schedules(p: int, m: int, name: str) -> None:
    assert send_window(schedule_named(name), p, m) == min(p + 1, m)
    assert send_window(forward_only, p, m, 1, False) == min(p + 1, m)


def test_a_schedule_that_would_stand_still_gets_a_larger_limit() -> None:
    for order, chunks in ((_mixed, 1), (_two_chunks, 2)):
        stages = [order(2, 9, stage) for stage in range(2)]
        with pytest.raises(ScheduleError, match="wait for each other"):
            validate(stages, 9, num_chunks=chunks, window=3)
        window = send_window(order, 2, 9, chunks)
        assert window > 3
        validate(stages, 9, num_chunks=chunks, window=window)


def _drive(rank: int, orders: list[list[Action]], num_chunks: int, window: int) -> object:
    exchange = make_exchange(num_chunks, timeout_s=2.0)
    exchange.window = window
    return drive(exchange, orders[rank], [micro_batch(i) for i in range(9)])


@pytest.mark.parametrize(("order", "num_chunks"), [(_mixed, 1), (_two_chunks, 2)], ids=["mixed", "two chunks"])
def test_with_this_limit_it_runs_to_its_end(order: object, num_chunks: int) -> None:
    window = send_window(order, 2, 9, num_chunks)  # type: ignore[arg-type]
    orders = [order(2, 9, stage) for stage in range(2)]  # type: ignore[operator]
    inputs = [micro_batch(i) for i in range(9)]
    check(run_ranks(2, _drive, orders, num_chunks, window), inputs, num_chunks)

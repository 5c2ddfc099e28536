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
from tests.helpers.lines import (
    check_equals_one_process,
    make_communicator,
    make_micro_batch,
    order_chunk_by_chunk,
    run_actions,
)


def _mixed(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
    """Stage 0 runs all forwards first, which the others' 1F1B lets it."""
    return (gpipe if stage == 0 else one_forward_one_backward)(num_stages, num_micro_batches, stage)


def _two_chunks(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
    return order_chunk_by_chunk(num_micro_batches, 2)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 40), st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
def test_named_schedules_need_stages_plus_one_sends(p: int, m: int, name: str) -> None:
    assert send_window(schedule_named(name), p, m) == min(p + 1, m)
    assert send_window(forward_only, p, m, 1, False) == min(p + 1, m)


def test_deadlocking_schedule_gets_larger_send_window() -> None:
    for order, chunks in ((_mixed, 1), (_two_chunks, 2)):
        stages = [order(2, 9, stage) for stage in range(2)]
        with pytest.raises(ScheduleError, match="wait for each other"):
            validate(stages, 9, num_chunks=chunks, window=3)
        window = send_window(order, 2, 9, chunks)
        assert window > 3
        validate(stages, 9, num_chunks=chunks, window=window)


def _drive(rank: int, orders: list[list[Action]], num_chunks: int, window: int) -> object:
    communicator = make_communicator(num_chunks, timeout_s=2.0)
    communicator.window = window
    return run_actions(communicator, orders[rank], [make_micro_batch(i) for i in range(9)])


@pytest.mark.parametrize(("order", "num_chunks"), [(_mixed, 1), (_two_chunks, 2)], ids=["mixed", "two chunks"])
def test_schedule_completes_with_computed_send_window(order: object, num_chunks: int) -> None:
    window = send_window(order, 2, 9, num_chunks)  # type: ignore[arg-type]
    orders = [order(2, 9, stage) for stage in range(2)]  # type: ignore[operator]
    inputs = [make_micro_batch(i) for i in range(9)]
    check_equals_one_process(run_ranks(2, _drive, orders, num_chunks, window), inputs, num_chunks)

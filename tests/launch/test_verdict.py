"""The culprit is the rank that caused the end, not those that it took along."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.launch.outcome import Exit, NodeBoard, relevant_exits, root_cause
from megatron.runtime.rank_status import LATE, RUNNING


def make_exit(rank: int, status: int, at: float, was_signalled: bool = False, state: str = "") -> Exit:
    return Exit(rank=rank, pid=1000 + rank, status=status, time_s=at, was_signalled=was_signalled, state=state)


@pytest.mark.parametrize(
    ("exits", "rank", "code"),
    [
        ([make_exit(0, 4, 0.0), make_exit(1, 5, 0.3)], 1, 5),
        ([make_exit(0, 4, 0.0), make_exit(1, -9, 0.1)], 1, 4),
        ([make_exit(0, 4, 0.0), make_exit(1, 1, 0.2)], 1, 1),
        ([make_exit(0, -9, 0.0), make_exit(1, 1, 0.2)], 0, 4),
        ([make_exit(0, 0, 0.0), make_exit(1, 4, 9.0)], 0, 4),
        ([make_exit(0, -9, 0.0), make_exit(1, 75, 0.5, was_signalled=True)], 0, 4),
        ([make_exit(0, 4, 0.0), make_exit(1, -15, 0.5, was_signalled=True)], 0, 4),
        ([make_exit(0, 4, 0.0), make_exit(1, 143, 0.5, was_signalled=True)], 0, 4),
        ([make_exit(0, 4, 0.0), make_exit(1, 143, 0.5)], 1, 1),
        ([make_exit(0, 4, 0.0), make_exit(1, 3, 5.0)], 0, 4),
        ([make_exit(0, 2, 0.1), make_exit(1, 2, 0.0)], 1, 2),
        ([make_exit(0, 200, 0.0)], 0, 1),
        ([make_exit(0, 4, 0.0), make_exit(1, 4, 0.5, True, LATE)], 1, 4),
        ([make_exit(0, 4, 0.0), make_exit(1, 4, 0.5, True, LATE), make_exit(2, 3, 0.6)], 2, 3),
        ([make_exit(0, 0, 0.0, state=RUNNING), make_exit(1, 0, 9.0, state=RUNNING)], 0, 4),
    ],
)
def test_root_cause_and_job_code(exits, rank, code):
    cause = root_cause(exits)
    assert cause is not None
    assert (cause.rank, cause.job_code) == (rank, code)


def test_no_root_cause_if_all_ranks_were_signalled():
    for status in (0, 4, 75, 143, -15, -9):
        assert root_cause([make_exit(0, status, 0.0, was_signalled=True)]) is None


def test_exit_text_names_signal():
    assert str(make_exit(3, -9, 0.0)) == "rank 3 (pid 1003) by SIGKILL"


EXITS = st.builds(
    Exit,
    rank=st.integers(0, 20),
    pid=st.just(1),
    status=st.sampled_from([0, 1, 2, 3, 4, 5, 75, 143, -9, -15]),
    time_s=st.integers(0, 30).map(lambda tenths: tenths / 10),
    was_signalled=st.booleans(),
    state=st.sampled_from(["", RUNNING, LATE]),
)


@given(st.lists(EXITS, max_size=12), st.lists(EXITS, max_size=4))
@example([make_exit(0, 4, 0.0), make_exit(3, -9, 0.5, was_signalled=True)], [])
@example([make_exit(0, 0, 0.0), make_exit(1, 0, 1.0, state=RUNNING)], [make_exit(2, 5, 2.5)])
def test_deciding_exits_give_same_root_cause(exits: list[Exit], later_exits: list[Exit]) -> None:
    decisive_exits = relevant_exits(exits)
    assert len(decisive_exits) <= 7 and relevant_exits(decisive_exits) == decisive_exits

    def key(cause: Exit | None) -> tuple[object, ...] | None:
        """Of those of one weight and time any may be named."""
        if cause is None:
            return None
        return ("stuck", cause.rank) if cause.is_stuck and cause.was_signalled else (cause.weight, cause.time_s)

    assert key(root_cause([*decisive_exits, *later_exits])) == key(root_cause([*exits, *later_exits]))


def test_simultaneous_failures_report_deciding_exits_only() -> None:
    num_nodes, store = 32, dist.HashStore()
    exits = [make_exit(8 * node, 4, at=0.1 + node / 100) for node in range(num_nodes)]
    exits[20] = make_exit(8 * 20, -9, at=0.9)
    boards = [NodeBoard(store, node, num_nodes, mock.Mock()) for node in range(num_nodes)]
    threads = [threading.Thread(target=boards[node].report_failed, args=(exits[node],)) for node in range(num_nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(board.is_failed() for board in boards)
    verdicts = boards[0].verdicts()
    assert root_cause(verdicts) == exits[20] and len(verdicts) <= 7
    assert all(board.verdicts() == verdicts for board in boards)


def test_concurrent_exit_entries_are_merged() -> None:
    """Between its look and its entry another node has entered one."""
    store = dist.HashStore()
    first, second = (NodeBoard(store, node, 2, mock.Mock()) for node in range(2))
    first_exit, second_exit = make_exit(0, 4, at=0.5), make_exit(8, -9, at=0.2)
    original_read, read_keys = first._read, []

    def read(key: str) -> str:
        value = original_read(key)
        if not read_keys:
            read_keys.append(key)
            second.report_failed(second_exit)
        return value

    first._read = read  # type: ignore[method-assign]
    first.report_failed(first_exit)
    assert root_cause(first.verdicts()) == second_exit and first_exit in second.verdicts()

"""The culprit is the rank that caused the end, not those that it took along."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.launch.outcome import Exit, NodeBoard, deciding, root_cause
from megatron.runtime.rank_status import LATE, RUNNING


def gone(rank: int, status: int, at: float, was_signalled: bool = False, state: str = "") -> Exit:
    return Exit(rank=rank, pid=1000 + rank, status=status, at=at, was_signalled=was_signalled, state=state)


@pytest.mark.parametrize(
    ("exits", "rank", "code"),
    [
        ([gone(0, 4, 0.0), gone(1, 5, 0.3)], 1, 5),
        ([gone(0, 4, 0.0), gone(1, -9, 0.1)], 1, 4),
        ([gone(0, 4, 0.0), gone(1, 1, 0.2)], 1, 1),
        ([gone(0, -9, 0.0), gone(1, 1, 0.2)], 0, 4),
        ([gone(0, 0, 0.0), gone(1, 4, 9.0)], 0, 4),
        ([gone(0, -9, 0.0), gone(1, 75, 0.5, was_signalled=True)], 0, 4),
        ([gone(0, 4, 0.0), gone(1, -15, 0.5, was_signalled=True)], 0, 4),
        ([gone(0, 4, 0.0), gone(1, 143, 0.5, was_signalled=True)], 0, 4),
        ([gone(0, 4, 0.0), gone(1, 143, 0.5)], 1, 1),
        ([gone(0, 4, 0.0), gone(1, 3, 5.0)], 0, 4),
        ([gone(0, 2, 0.1), gone(1, 2, 0.0)], 1, 2),
        ([gone(0, 200, 0.0)], 0, 1),
        ([gone(0, 4, 0.0), gone(1, 4, 0.5, True, LATE)], 1, 4),
        ([gone(0, 4, 0.0), gone(1, 4, 0.5, True, LATE), gone(2, 3, 0.6)], 2, 3),
        ([gone(0, 0, 0.0, state=RUNNING), gone(1, 0, 9.0, state=RUNNING)], 0, 4),
    ],
)
def test_culprit_and_code(exits, rank, code):
    found = root_cause(exits)
    assert found is not None
    assert (found.rank, found.job_code) == (rank, code)


def test_nobody_is_the_culprit_when_all_were_told_to_leave():
    for status in (0, 4, 75, 143, -15, -9):
        assert root_cause([gone(0, status, 0.0, was_signalled=True)]) is None


def test_a_signal_is_named():
    assert str(gone(3, -9, 0.0)) == "rank 3 (pid 1003) by SIGKILL"


EXITS = st.builds(
    Exit,
    rank=st.integers(0, 20),
    pid=st.just(1),
    status=st.sampled_from([0, 1, 2, 3, 4, 5, 75, 143, -9, -15]),
    at=st.integers(0, 30).map(lambda tenths: tenths / 10),
    was_signalled=st.booleans(),
    state=st.sampled_from(["", RUNNING, LATE]),
)


@given(st.lists(EXITS, max_size=12), st.lists(EXITS, max_size=4))
@example([gone(0, 4, 0.0), gone(3, -9, 0.5, was_signalled=True)], [])
@example([gone(0, 0, 0.0), gone(1, 0, 1.0, state=RUNNING)], [gone(2, 5, 2.5)])
def test_the_few_that_decide_name_the_culprit_of_all_whatever_comes_later(some: list[Exit], later: list[Exit]) -> None:
    few = deciding(some)
    assert len(few) <= 7 and deciding(few) == few

    def key(found: Exit | None) -> tuple[object, ...] | None:
        """Of those of one weight and time any may be named."""
        if found is None:
            return None
        return ("stuck", found.rank) if found.is_stuck and found.was_signalled else (found.weight, found.at)

    assert key(root_cause([*few, *later])) == key(root_cause([*some, *later]))


def test_nodes_that_fail_at_once_leave_the_few_exits_that_decide() -> None:
    nodes, store = 32, dist.HashStore()
    exits = [gone(8 * node, 4, at=0.1 + node / 100) for node in range(nodes)]
    exits[20] = gone(8 * 20, -9, at=0.9)
    boards = [NodeBoard(store, node, nodes, mock.Mock()) for node in range(nodes)]
    threads = [threading.Thread(target=boards[node].report_failed, args=(exits[node],)) for node in range(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(board.is_failed() for board in boards)
    found = boards[0].verdicts()
    assert root_cause(found) == exits[20] and len(found) <= 7
    assert all(board.verdicts() == found for board in boards)


def test_a_node_enters_its_exit_beside_what_came_in_between() -> None:
    """Between its look and its entry another node has entered one."""
    store = dist.HashStore()
    first, second = (NodeBoard(store, node, 2, mock.Mock()) for node in range(2))
    own, other = gone(0, 4, at=0.5), gone(8, -9, at=0.2)
    look, looks = first._read, []

    def read(key: str) -> str:
        found = look(key)
        if not looks:
            looks.append(key)
            second.report_failed(other)
        return found

    first._read = read  # type: ignore[method-assign]
    first.report_failed(own)
    assert root_cause(first.verdicts()) == other and own in second.verdicts()

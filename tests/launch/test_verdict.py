"""The culprit is the rank that caused the end, not those that it took along."""

from __future__ import annotations

import pytest

from megatron.launch.outcome import Exit, root_cause
from megatron.training.failure import LATE, RUNNING


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
    assert root_cause([gone(0, 4, 0.0, was_signalled=True)]) is None


def test_a_signal_is_named():
    assert str(gone(3, -9, 0.0)) == "rank 3 (pid 1003) by SIGKILL"

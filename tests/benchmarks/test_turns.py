"""Processes of contenders: only their answers are heard, one that is silent is missed, and none is left behind."""

from __future__ import annotations

import os
import time
from contextlib import closing

import pytest

from benchmarks import turns
from benchmarks.turns import Team, rotated


class Worker:
    def __init__(self, offset: int, rank: int) -> None:
        self._offset, self._rank = offset, rank

    def add(self, increment: int) -> int:
        os.write(1, b"noise of an engine\n")
        return self._offset + increment + self._rank

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds * self._rank)


def test_processes_answer_and_their_output_is_hidden(capfd: pytest.CaptureFixture[str]) -> None:
    team = Team("toy", Worker, (1,), size=3, start_method="fork")
    team.ready()
    assert team.ask("add", 10) == [11, 12, 13]
    team.close()
    team.close()
    assert capfd.readouterr().out == ""
    assert not any(process.is_alive() for process in team._processes)


def test_silent_process_is_reported_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Team("toy", Worker, (1,), size=2, start_method="fork")) as team:
        team.ready()
        monkeypatch.setattr(turns, "ANSWER_TIMEOUT_S", 0.2)
        monkeypatch.setattr(turns, "EXIT_TIMEOUT_S", 0.2)
        with pytest.raises(RuntimeError, match=r'"toy": ranks \[1\] must answer within 0.2 s'):
            team.ask("sleep", 60.0)
    assert not any(process.is_alive() for process in team._processes)


def test_rotation_puts_each_contender_first_once() -> None:
    orders = [rotated("abc", round_idx) for round_idx in range(4)]
    assert [order[0] for order in orders] == ["a", "b", "c", "a"] and all(
        sorted(order) == ["a", "b", "c"] for order in orders
    )
    assert rotated([], 1) == []

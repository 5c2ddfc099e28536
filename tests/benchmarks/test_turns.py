"""Processes of contenders: only their answers are heard, one that is silent is missed, and none is left behind."""

from __future__ import annotations

import os
import time
from contextlib import closing

import pytest

from benchmarks import turns
from benchmarks.turns import Team, rotated


class Worker:
    def __init__(self, first: int, rank: int) -> None:
        self._first, self._rank = first, rank

    def add(self, number: int) -> int:
        os.write(1, b"noise of an engine\n")
        return self._first + number + self._rank

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds * self._rank)


def test_every_process_answers_and_what_it_prints_is_kept_out_of_the_tables(capfd: pytest.CaptureFixture[str]) -> None:
    team = Team("toy", Worker, (1,), size=3, start_method="fork")
    team.ready()
    assert team.ask("add", 10) == [11, 12, 13]
    team.close()
    team.close()
    assert capfd.readouterr().out == ""
    assert not any(process.is_alive() for process in team._processes)


def test_a_process_that_says_nothing_is_named_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Team("toy", Worker, (1,), size=2, start_method="fork")) as team:
        team.ready()
        monkeypatch.setattr(turns, "PATIENCE_S", 0.2)
        monkeypatch.setattr(turns, "FAREWELL_S", 0.2)
        with pytest.raises(RuntimeError, match=r'"toy": ranks \[1\] must answer within 0.2 s'):
            team.ask("sleep", 60.0)
    assert not any(process.is_alive() for process in team._processes)


def test_each_contender_is_first_once() -> None:
    orders = [rotated("abc", number) for number in range(4)]
    assert [order[0] for order in orders] == ["a", "b", "c", "a"] and all(
        sorted(each) == ["a", "b", "c"] for each in orders
    )
    assert rotated([], 1) == []

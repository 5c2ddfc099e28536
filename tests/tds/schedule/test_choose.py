"""The schedule with the shortest predicted step is chosen, of equals the one that holds least."""

from __future__ import annotations

import pytest

from tds.schedule import Action, Costs, Forward, ScheduleError, choose, schedule_named

SCHEDULES = {name: schedule_named(name) for name in ("gpipe", "1f1b", "zb-h1")}


def test_fastest_schedule_is_chosen_with_predicted_times() -> None:
    choice = choose(SCHEDULES, Costs.even(2, 0.1, 0.1, 0.1), 2, 8)
    assert choice.name == "zb-h1"
    assert choice.reason == "zb-h1: predicted 2.5 s per step against 2.7 (gpipe), 2.7 (1f1b)"
    assert choice.timelines["1f1b"].bubble == pytest.approx(1 / 9)
    assert choice.peaks == {"gpipe": 8, "1f1b": 2, "zb-h1": 2}


def test_ties_choose_lower_peak_memory() -> None:
    choice = choose({name: SCHEDULES[name] for name in ("gpipe", "1f1b")}, Costs.even(2, 0.01, 0.01, 0.01), 2, 8)
    assert choice.name == "1f1b"
    assert choice.reason == (
        "1f1b: predicted 270 ms per step against 270 (gpipe); it has 2 micro-batches in flight, against 8 (gpipe)"
    )


def test_expensive_split_backward_is_not_chosen_for_one_stage() -> None:
    assert choose(SCHEDULES, Costs.even(1), 1, 4).name == "1f1b"


def test_chunks_leave_one_candidate() -> None:
    choice = choose({"interleaved": schedule_named("interleaved", 2)}, Costs.even(4), 2, 4, 2)
    assert choice.reason == "interleaved: predicted 27 s per step"


def test_invalid_candidate_is_named_in_error() -> None:
    def mine(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
        return [Forward(i) for i in range(num_micro_batches)]

    with pytest.raises(ScheduleError, match="the schedule mine cannot run: stage 0 must have one Backward"):
        choose({"mine": mine}, Costs.even(2), 2, 2)
    with pytest.raises(ValueError, match="at least one schedule"):
        choose({}, Costs.even(2), 2, 2)

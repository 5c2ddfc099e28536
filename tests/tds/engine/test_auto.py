""" "auto" measures, chooses, says so, and changes nothing but the time."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from tds.engine.auto_schedule import AutoSchedule, allowed_schedules, fastest_schedule, trial_schedules
from tds.schedule import Costs, Placement, schedule_named, simulate
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine, train_batch

ONE_CHUNK = ("1f1b", "gpipe", "zb-h1")
NUM_TRIALS = len(trial_schedules(ONE_CHUNK, Placement(2)))


def test_auto_chooses_zero_bubble_if_faster() -> None:
    even = Costs.even(4)
    full_costs = Costs(even.forward, (2.0,) * 4, (0.0,) * 4)
    name, reason = fastest_schedule(full_costs, even, Placement(4), 8)
    assert name == "zb-h1"
    assert (
        "zb-h1 for 8 micro-batches, with a bubble of " in reason
        and "1f1b 33000.0" in reason
        and "stage 3: 1000.0 2000.0" in reason
    )


@pytest.mark.parametrize("slow", [1.3, 3.0])
def test_auto_rejects_split_that_costs_more_than_it_saves(slow: float) -> None:
    full_costs = Costs((1.0,) * 2, (2.0,) * 2, (0.0,) * 2)
    assert fastest_schedule(full_costs, Costs.even(2, B=slow, W=slow), Placement(2), 8)[0] == "1f1b"


def test_auto_prefers_lower_memory_on_ties() -> None:
    full_costs = Costs((1.0,) * 2, (2.0,) * 2, (0.0,) * 2)
    assert fastest_schedule(full_costs, Costs((1.0,) * 2, (2.0,) * 2, (0.0,) * 2), Placement(2), 4)[0] == "1f1b"


class _LogCapture(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _run(rank: int, schedule: str, options: dict[str, Any]) -> list[Any]:
    capture = _LogCapture()
    logging.getLogger("tds").addHandler(capture)
    toy = Toy("chain", pipeline={"schedule": schedule}, options=options)
    engine = make_engine(toy, 2)
    engine.optimizer.param_groups[0]["lr"] = 0.1
    names, results = [], []
    for _ in range(NUM_TRIALS + 2):
        results.append(train_batch(engine, toy)[:2])
        names.append(engine._plan.name)
    return [names, results, [line for line in capture.lines if '"auto"' in line]]


def test_all_ranks_switch_together_and_results_equal_1f1b() -> None:
    chosen = run_ranks(4, _run, "auto", {})
    plain = run_ranks(4, _run, "1f1b", {})
    assert all(names == chosen[0][0] for names, _, _ in chosen)
    assert chosen[0][0][:3] == ["1f1b", "1f1b", "zb-h1"]
    assert chosen[0][0][-1] in ("1f1b", "gpipe", "zb-h1")
    for (_, got, _), (_, expected, _) in zip(chosen, plain, strict=True):
        for (loss, gradients), (loss_1f1b, gradients_1f1b) in zip(got, expected, strict=True):
            assert torch.equal(loss, loss_1f1b)
            assert all(torch.equal(gradients[name], gradients_1f1b[name]) for name in gradients_1f1b)
    assert len(chosen[0][2]) == 1 and "simulated step times in ms" in chosen[0][2][0]
    assert not any(lines for _, _, lines in chosen[1:])


def _set_schedule_during_training(rank: int, set_step: int) -> tuple[list[str], list[str]]:
    """Train with a schedule that the program sets at step ``set_step``, and with more micro-batches from step 5."""
    capture = _LogCapture()
    logging.getLogger("tds").addHandler(capture)
    toy = Toy("chain", pipeline={"schedule": "auto"})
    engine = make_engine(toy, 2)
    names = []
    for step in range(NUM_TRIALS + 3):
        if step == set_step:
            engine.set_schedule("gpipe")
        if step == NUM_TRIALS + 1:
            larger_toy = replace(toy, num_micro_batches=2 * toy.num_micro_batches)
            engine.set_train_batch_size(2 * engine.train_batch_size())
        engine.train_batch(iter((larger_toy if step > NUM_TRIALS else toy).make_batches()))
        names.append(engine._plan.name)
    return names, [line for line in capture.lines if '"auto"' in line]


@pytest.mark.parametrize("set_step", [1, NUM_TRIALS])
def test_schedule_set_by_program_is_retained(set_step: int) -> None:
    for names, lines in run_ranks(2, _set_schedule_during_training, set_step):
        assert (
            names[:set_step]
            == list(trial_schedules(ONE_CHUNK, Placement(2))[: set_step - 1]) + names[set_step - 1 : set_step]
        )
        assert set(names[set_step:]) == {"gpipe"} and len(lines) <= (set_step > 1)


def test_auto_chooses_again_for_new_micro_batch_count() -> None:
    m = Toy("chain").num_micro_batches
    (names, lines), (other_names, _) = run_ranks(2, _set_schedule_during_training, -1)
    assert names == other_names
    assert [f"for {n} micro-batches" in line for n, line in zip((m, 2 * m), lines, strict=True)] == [True, True]


def test_choice_depends_on_micro_batch_count() -> None:
    set_to: list[str] = []
    auto = AutoSchedule(
        set_to.append, ONE_CHUNK, placement=Placement(2), stage=0, group=None, device=torch.device("cpu")
    )
    auto._log = lambda _: None  # type: ignore[method-assign]
    even, full_costs = Costs.even(2), Costs((1.0,) * 2, (1.98,) * 2, (0.0,) * 2)
    auto._measured, auto._step = [full_costs, even], NUM_TRIALS - 1
    auto.observe(None, 2)
    auto.before_step(2)
    auto.before_step(64)
    auto.before_step(64)
    assert set_to == ["1f1b", "zb-h1", "1f1b"]
    auto.keep_schedule()
    auto.before_step(2)
    assert len(set_to) == 3


def test_auto_with_chunks_chooses_between_interleaved_and_zb_h1() -> None:
    placements = Placement(2), Placement(2, 2)
    assert [trial_schedules(allowed_schedules("auto", placement), placement)[0] for placement in placements] == [
        "1f1b",
        "interleaved",
    ]
    chosen = run_ranks(2, _run, "auto", {"chunks": 2})
    (names, got, lines), (other_names, _, _) = chosen
    assert names == other_names and names[:3] == ["interleaved", "interleaved", "zb-h1"]
    assert names[-1] in ("interleaved", "zb-h1")
    assert "stage 1 chunk 1: " in lines[0] and "gpipe" not in lines[0]
    for (loss, gradients), (expected, plain) in zip(
        got, run_ranks(2, _run, "interleaved", {"chunks": 2})[0][1], strict=True
    ):
        assert torch.equal(loss, expected) and all(torch.equal(gradients[name], plain[name]) for name in plain)


def test_auto_with_chunks_uses_costs_of_all_chunks() -> None:
    full_costs = Costs((1.0,) * 4, (2.0,) * 4, (0.0,) * 4)
    name, reason = fastest_schedule(full_costs, Costs.even(4), Placement(2, 2), 8)
    assert name == "zb-h1" and "interleaved 51000.0" in reason and "zb-h1 49000.0" in reason
    assert fastest_schedule(full_costs, Costs.even(4, B=1.2, W=1.2), Placement(2, 2), 8)[0] == "interleaved"


def test_auto_uses_unsplit_trial_for_full_backward_cost() -> None:
    """With few micro-batches stage 1 splits all; with more it does not, and the halves' sum would be too dear."""
    full_costs = Costs((1.0,) * 4, (2.0,) * 4, (0.0,) * 4)
    split_costs = Costs((1.0,) * 4, (1.05,) * 4, (1.05,) * 4, backward=(2.0, 2.1, 2.0, 2.1))
    assert fastest_schedule(full_costs, split_costs, Placement(2, 2), 32) == fastest_schedule(
        full_costs, replace(split_costs, backward=(2.0,) * 4), Placement(2, 2), 32
    )
    assert simulated_step_time("zb-h1", split_costs) > simulated_step_time(
        "zb-h1", replace(split_costs, backward=(2.0,) * 4)
    )


def simulated_step_time(name: str, costs: Costs) -> float:
    order = schedule_named(name, 2)
    return simulate([order(2, 32, stage) for stage in range(2)], costs, 2).step_s


def test_auto_uses_1f1b_on_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(AutoSchedule, "_log", lambda self, reason: messages.append(reason))
    auto = AutoSchedule(
        messages.append, ONE_CHUNK, placement=Placement(1), stage=0, group=None, device=torch.device("cpu")
    )
    assert auto.is_chosen and messages == ["1f1b", "1f1b: with one stage there is no choice"]


@pytest.mark.slow
def test_auto_list_restricts_trials_and_choice() -> None:
    chosen = run_ranks(2, _run, "auto:1f1b,gpipe", {})
    names = chosen[0][0]
    assert names[:3] == ["1f1b", "1f1b", "gpipe"] and names[-1] in ("1f1b", "gpipe")
    assert "zb-h1" not in chosen[0][2][0]
    (names, got, lines), *_ = run_ranks(2, _run, "AUTO:gpipe", {})
    assert set(names) == {"gpipe"} and lines == ['"schedule": "auto" runs gpipe: with one schedule there is no choice']
    assert all(torch.equal(loss, expected) for (loss, _), (expected, _) in zip(got, chosen[0][1], strict=True))


def test_auto_list_excludes_faster_schedule() -> None:
    full_costs = Costs((1.0,) * 4, (2.0,) * 4, (0.0,) * 4)
    assert fastest_schedule(full_costs, Costs.even(4), Placement(4), 8)[0] == "zb-h1"
    assert fastest_schedule(full_costs, Costs.even(4), Placement(4), 8, ("1f1b", "gpipe"))[0] == "1f1b"


@pytest.mark.parametrize("schedule", ["auto:zb-v", "auto:1f1b,fastest", "auto:auto"])
def test_auto_rejects_schedules_incompatible_with_placement(schedule: str) -> None:
    with pytest.raises(ValueError, match=rf'among 1f1b, gpipe, zb-h1 for 1 chunks .* got .*"{schedule}"'):
        allowed_schedules(schedule, Placement(2))

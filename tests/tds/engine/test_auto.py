""" "auto" measures, chooses, says so, and changes nothing but the time."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from tds.engine.auto_schedule import Auto, best, choices, trials
from tds.schedule import Costs, Placement, schedule_named, simulate
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine, train

ONE_CHUNK = ("1f1b", "gpipe", "zb-h1")
NUM_TRIALS = len(trials(ONE_CHUNK, Placement(2)))


def test_zero_bubble_is_chosen_where_it_is_faster() -> None:
    even = Costs.even(4)
    whole = Costs(even.forward, (2.0,) * 4, (0.0,) * 4)
    name, reason = best(whole, even, Placement(4), 8)
    assert name == "zb-h1"
    assert (
        "zb-h1 for 8 micro-batches, with a bubble of " in reason
        and "1f1b 33000.0" in reason
        and "stage 3: 1000.0 2000.0" in reason
    )


@pytest.mark.parametrize("slow", [1.3, 3.0])
def test_splitting_that_costs_more_than_it_saves_is_not_chosen(slow: float) -> None:
    whole = Costs((1.0,) * 2, (2.0,) * 2, (0.0,) * 2)
    assert best(whole, Costs.even(2, B=slow, W=slow), Placement(2), 8)[0] == "1f1b"


def test_equal_times_choose_the_schedule_that_holds_less() -> None:
    whole = Costs((1.0,) * 2, (2.0,) * 2, (0.0,) * 2)
    assert best(whole, Costs((1.0,) * 2, (2.0,) * 2, (0.0,) * 2), Placement(2), 4)[0] == "1f1b"


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _run(rank: int, schedule: str, options: dict[str, Any]) -> list[Any]:
    heard = _Heard()
    logging.getLogger("tds").addHandler(heard)
    toy = Toy("chain", pipeline={"schedule": schedule}, options=options)
    engine = make_engine(toy, 2)
    engine.optimizer.param_groups[0]["lr"] = 0.1
    names, results = [], []
    for _ in range(NUM_TRIALS + 2):
        results.append(train(engine, toy)[:2])
        names.append(engine._plan.name)
    return [names, results, [line for line in heard.lines if '"auto"' in line]]


def test_every_rank_switches_at_the_same_step_and_the_results_are_those_of_1f1b() -> None:
    chosen = run_ranks(4, _run, "auto", {})
    plain = run_ranks(4, _run, "1f1b", {})
    assert all(names == chosen[0][0] for names, _, _ in chosen)
    assert chosen[0][0][:3] == ["1f1b", "1f1b", "zb-h1"]
    assert chosen[0][0][-1] in ("1f1b", "gpipe", "zb-h1")
    for (_, got, _), (_, wanted, _) in zip(chosen, plain, strict=True):
        for (loss, gradients), (loss_1f1b, gradients_1f1b) in zip(got, wanted, strict=True):
            assert torch.equal(loss, loss_1f1b)
            assert all(torch.equal(gradients[name], gradients_1f1b[name]) for name in gradients_1f1b)
    assert len(chosen[0][2]) == 1 and "simulated step times in ms" in chosen[0][2][0]
    assert not any(lines for _, _, lines in chosen[1:])


def _change(rank: int, when: int) -> tuple[list[str], list[str]]:
    """Train with a schedule that the program sets at step ``when``, and with more micro-batches from step 5."""
    heard = _Heard()
    logging.getLogger("tds").addHandler(heard)
    toy = Toy("chain", pipeline={"schedule": "auto"})
    engine = make_engine(toy, 2)
    names = []
    for step in range(NUM_TRIALS + 3):
        if step == when:
            engine.set_schedule("gpipe")
        if step == NUM_TRIALS + 1:
            more = replace(toy, micro_batches=2 * toy.micro_batches)
            engine.set_train_batch_size(2 * engine.train_batch_size())
        engine.train_batch(iter((more if step > NUM_TRIALS else toy).batches()))
        names.append(engine._plan.name)
    return names, [line for line in heard.lines if '"auto"' in line]


@pytest.mark.parametrize("when", [1, NUM_TRIALS])
def test_a_schedule_that_the_program_sets_stays(when: int) -> None:
    for names, lines in run_ranks(2, _change, when):
        assert names[:when] == list(trials(ONE_CHUNK, Placement(2))[: when - 1]) + names[when - 1 : when]
        assert set(names[when:]) == {"gpipe"} and len(lines) <= (when > 1)


def test_another_number_of_micro_batches_chooses_again() -> None:
    m = Toy("chain").micro_batches
    (names, lines), (others, _) = run_ranks(2, _change, -1)
    assert names == others
    assert [f"for {n} micro-batches" in line for n, line in zip((m, 2 * m), lines, strict=True)] == [True, True]


def test_the_number_of_micro_batches_decides() -> None:
    set_to: list[str] = []
    auto = Auto(set_to.append, ONE_CHUNK, placement=Placement(2), stage=0, group=None, device=torch.device("cpu"))
    auto._log = lambda _: None  # type: ignore[method-assign]
    even, whole = Costs.even(2), Costs((1.0,) * 2, (1.98,) * 2, (0.0,) * 2)
    auto._measured, auto._step = [whole, even], NUM_TRIALS - 1
    auto.observe(None, 2)
    auto.before_step(2)
    auto.before_step(64)
    auto.before_step(64)
    assert set_to == ["1f1b", "zb-h1", "1f1b"]
    auto.keep_schedule()
    auto.before_step(2)
    assert len(set_to) == 3


def test_with_chunks_the_choice_is_between_whole_and_split_backwards() -> None:
    lies = Placement(2), Placement(2, 2)
    assert [trials(choices("auto", each), each)[0] for each in lies] == ["1f1b", "interleaved"]
    chosen = run_ranks(2, _run, "auto", {"chunks": 2})
    (names, got, lines), (others, _, _) = chosen
    assert names == others and names[:3] == ["interleaved", "interleaved", "zb-h1"]
    assert names[-1] in ("interleaved", "zb-h1")
    assert "stage 1 chunk 1: " in lines[0] and "gpipe" not in lines[0]
    for (loss, gradients), (wanted, plain) in zip(
        got, run_ranks(2, _run, "interleaved", {"chunks": 2})[0][1], strict=True
    ):
        assert torch.equal(loss, wanted) and all(torch.equal(gradients[name], plain[name]) for name in plain)


def test_with_chunks_the_costs_of_all_pieces_decide() -> None:
    whole = Costs((1.0,) * 4, (2.0,) * 4, (0.0,) * 4)
    name, reason = best(whole, Costs.even(4), Placement(2, 2), 8)
    assert name == "zb-h1" and "interleaved 51000.0" in reason and "zb-h1 49000.0" in reason
    assert best(whole, Costs.even(4, B=1.2, W=1.2), Placement(2, 2), 8)[0] == "interleaved"


def test_a_whole_backward_is_reckoned_by_the_trial_that_had_whole_ones() -> None:
    """With few micro-batches stage 1 splits all; with more it does not, and the halves' sum would be too dear."""
    whole = Costs((1.0,) * 4, (2.0,) * 4, (0.0,) * 4)
    dear = Costs((1.0,) * 4, (1.05,) * 4, (1.05,) * 4, backward=(2.0, 2.1, 2.0, 2.1))
    assert best(whole, dear, Placement(2, 2), 32) == best(
        whole, replace(dear, backward=(2.0,) * 4), Placement(2, 2), 32
    )
    assert simulate_all("zb-h1", dear) > simulate_all("zb-h1", replace(dear, backward=(2.0,) * 4))


def simulate_all(name: str, costs: Costs) -> float:
    order = schedule_named(name, 2)
    return simulate([order(2, 32, stage) for stage in range(2)], costs, 2).step_s


def test_one_stage_leaves_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(Auto, "_log", lambda self, reason: messages.append(reason))
    auto = Auto(messages.append, ONE_CHUNK, placement=Placement(1), stage=0, group=None, device=torch.device("cpu"))
    assert auto.is_chosen and messages == ["1f1b", "1f1b: with one stage there is no choice"]


@pytest.mark.slow
def test_auto_of_some_schedules_tries_and_takes_no_other() -> None:
    chosen = run_ranks(2, _run, "auto:1f1b,gpipe", {})
    names = chosen[0][0]
    assert names[:3] == ["1f1b", "1f1b", "gpipe"] and names[-1] in ("1f1b", "gpipe")
    assert "zb-h1" not in chosen[0][2][0]
    (names, got, lines), *_ = run_ranks(2, _run, "AUTO:gpipe", {})
    assert set(names) == {"gpipe"} and lines == ['"schedule": "auto" runs gpipe: with one schedule there is no choice']
    assert all(torch.equal(loss, wanted) for (loss, _), (wanted, _) in zip(got, chosen[0][1], strict=True))


def test_a_schedule_that_is_not_among_them_is_not_chosen_though_it_is_faster() -> None:
    whole = Costs((1.0,) * 4, (2.0,) * 4, (0.0,) * 4)
    assert best(whole, Costs.even(4), Placement(4), 8)[0] == "zb-h1"
    assert best(whole, Costs.even(4), Placement(4), 8, ("1f1b", "gpipe"))[0] == "1f1b"


@pytest.mark.parametrize("schedule", ["auto:zb-v", "auto:1f1b,fastest", "auto:auto"])
def test_auto_of_schedules_that_layers_lie_wrong_for_is_refused(schedule: str) -> None:
    with pytest.raises(ValueError, match=rf'among 1f1b, gpipe, zb-h1 for chunks .* got .*"{schedule}"'):
        choices(schedule, Placement(2))

"""Traces: what is written, what it costs, and that nothing is lost or done where nobody asked."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tds import plot
from tds.action_times import Recorder, Work
from tds.clocks import HostClock
from tds.engine import trace_window
from tds.schedule import Backward, BackwardInput, BackwardWeight, Forward, schedule_named
from tds.trace import TraceFile, events, name_of, read_traces
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine

ALLOWED_S = 20e-6
ABOUT = {"stage": 0, "num_stages": 1, "num_chunks": 1, "replica": 0, "tensor_rank": 0, "run": 1}


def _cost_per_action_s(number: int = 2000) -> float:
    """Return the best of five loops: others share the machine."""
    best = float("inf")
    for _ in range(5):
        exchange = SimpleNamespace(clock=HostClock(), waits=[(1, 2)] * 4)
        recorder = Recorder(exchange)
        action = Forward(3)
        began = time.perf_counter()
        for _ in range(number):
            recorder.before()
            exchange.waits.append((3, 4))
            recorder.after(action)
        best = min(best, (time.perf_counter() - began) / number)
    return best


def test_a_recorded_action_costs_at_most_20_us() -> None:
    cost_s = _cost_per_action_s()
    print(f"a recorded action costs {cost_s * 1e6:.2f} us")
    assert cost_s < ALLOWED_S


def test_an_action_is_told_with_its_waits_and_its_work() -> None:
    exchange = SimpleNamespace(clock=HostClock(), waits=[])
    recorder = Recorder(exchange)
    recorder.before()
    before = time.perf_counter_ns()
    after = time.perf_counter_ns() + 1
    exchange.waits.append((before, after))
    recorder.after(Forward(0))
    recorder.before()
    recorder.after(Backward(0))
    first, second = recorder.take()
    assert first.waits == ((before, after),) and first.started_ns == after and not second.waits
    assert first.work_ns == first.ended_ns - first.began_ns - (after - before)
    assert recorder.take() == []


def test_actions_have_the_names_of_the_picture() -> None:
    actions = [Forward(3), Backward(3), BackwardInput(0, 1), BackwardWeight(12, 2)]
    assert [name_of(action) for action in actions] == ["F3", "B3", "I0.1", "W12.2"]


def _train(rank: int, folder: str | None, schedule: str, steps: int, fails_at: int | None) -> dict[str, int]:
    pipeline = {"schedule": schedule} | ({} if folder is None else {"trace": folder, "trace_steps": 2})
    toy = Toy("chain", pipeline=pipeline)
    plot.draw = lambda *_: None
    engine = make_engine(toy, 2)
    calls = {"before": 0, "after": 0}
    for name in calls:
        original = getattr(Recorder, name)

        def counted(self: Any, *args: Any, name: str = name, original: Any = original) -> None:
            calls[name] += 1
            original(self, *args)

        setattr(Recorder, name, counted)
    for step in range(steps):
        if step == fails_at:
            engine.on_micro_batch = _fail
        try:
            engine.train_batch(iter(toy.batches()))
        except ArithmeticError:
            return calls
    return calls


def _fail(index: int) -> None:
    if index == 2:
        raise ArithmeticError(index)


def test_without_a_trace_the_recorder_is_never_called() -> None:
    assert run_ranks(2, _train, None, "1f1b", 2, None) == [{"before": 0, "after": 0}] * 2


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_first_steps_are_written_and_read_back(schedule: str, tmp_path: Path) -> None:
    m = Toy("chain").micro_batches
    orders = [schedule_named(schedule)(2, m, stage) for stage in range(2)]
    calls = run_ranks(2, _train, str(tmp_path), schedule, 4, None)
    assert calls == [{"before": 2 * len(order), "after": 2 * len(order)} for order in orders]
    steps = read_traces(tmp_path)
    assert [(s.step, s.replica, s.schedule, s.num_chunks, s.num_micro_batches) for s in steps] == [
        (0, 0, schedule, 1, m), (1, 0, schedule, 1, m)
    ]  # fmt: skip
    for step in steps:
        assert [[span.action for span in row] for row in step.timeline.spans] == orders
        assert min(span.start_s for row in step.timeline.spans for span in row) == 0
        assert all(
            b.start_s >= a.end_s - 1e-6 for row in step.timeline.spans for a, b in zip(row, row[1:], strict=False)
        )
        assert 0 < step.timeline.bubble < 1
        assert all(cost > 0 for cost in step.costs.forward + step.costs.backward_input)
        splits = [any(isinstance(action, BackwardWeight) for action in order) for order in orders]
        assert [cost > 0 for cost in step.costs.backward_weight] == splits
    second = json.loads((tmp_path / "trace-rank1.json").read_text())
    assert second["displayTimeUnit"] == "ms" and second["tds"]["stage"] == 1 and second["tds"]["max_steps"] == 2
    event = next(e for e in second["traceEvents"] if e["name"] == "F0")
    assert {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"} == set(event) and event["tid"] == 1
    assert any(e["name"] == "wait" for e in second["traceEvents"])


NAP_S = 0.02


def _train_with_naps(rank: int, folder: str) -> None:
    plot.draw = lambda *_: None
    toy = Toy("chain", pipeline={"trace": folder})
    engine = make_engine(toy, 2)
    engine.on_micro_batch = lambda _: time.sleep(NAP_S)
    engine.train_batch(iter(toy.batches()))


def test_messages_arrive_after_they_were_sent_on_the_common_clock(tmp_path: Path) -> None:
    """A forward begins to work once its message is there, which left at the end of the other stage's."""
    run_ranks(2, _train_with_naps, str(tmp_path))
    first, second = read_traces(tmp_path)[-1].timeline.spans
    sent = {span.action.micro_batch: span for span in first if isinstance(span.action, Forward)}
    taken = {span.action.micro_batch: span for span in second if isinstance(span.action, Forward)}
    assert all(taken[i].start_s >= sent[i].start_s + NAP_S for i in sent)
    assert all(taken[i].end_s >= sent[i].end_s for i in sent)  # it naps as well


def test_what_ran_ahead_of_an_error_is_not_lost(tmp_path: Path) -> None:
    run_ranks(1, _train_alone, str(tmp_path))
    trace = json.loads((tmp_path / "trace-rank0.json").read_text())
    names = [e["name"] for e in trace["traceEvents"] if e["ph"] == "X" and e["args"]["step"] == 1]
    assert names == ["F0", "B0", "F1", "B1"]
    assert [step.step for step in read_traces(tmp_path)] == [0]


def _train_alone(rank: int, folder: str) -> None:
    plot.draw = lambda *_: None
    toy = Toy("chain", pipeline={"trace": folder})
    engine = make_engine(toy, 1)
    engine.train_batch(iter(toy.batches()))
    engine.on_micro_batch = _fail
    with pytest.raises(ArithmeticError):
        engine.train_batch(iter(toy.batches()))


def _write(folder: Path, rank: int, **about: Any) -> None:
    file = TraceFile(folder, rank, {**ABOUT, **about})
    work = [Work(Forward(0), 10, 30, ((12, 15),)), Work(Backward(0), 30, 50)]
    place = {"replica": about.get("replica", 0), "stage": about.get("stage", 0), "origin_ns": 0}
    file.add(events(work, step=0, schedule="1f1b", num_micro_batches=1, **place))


def test_files_of_an_older_run_are_left_out_and_missing_stages_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="trace-rank"):
        read_traces(tmp_path)
    _write(tmp_path, 0, run=2)
    _write(tmp_path, 1, run=1, stage=1, num_stages=2)
    (step,) = read_traces(tmp_path)
    assert step.costs.forward == pytest.approx((17e-9,)) and step.timeline.spans[0][0].end_s == pytest.approx(15e-9)
    _write(tmp_path, 1, run=3, stage=1, num_stages=2)
    with pytest.raises(ValueError, match=r"each of 2 stages, got stages \[1\] of replica 0"):
        read_traces(tmp_path)
    (tmp_path / "trace-rank1.json").write_text('{"tds": {')
    with pytest.raises(ValueError, match="not a trace of tds, or it is truncated"):
        read_traces(tmp_path)


def test_a_restart_into_the_same_folder_keeps_what_the_first_run_has_left(tmp_path: Path) -> None:
    for run in (1, 2, 3):
        _write(tmp_path, 0, run=run)
    names = ["trace-rank0.json.1", "trace-rank0.json.2", "trace-rank0.json"]
    runs = [json.loads((tmp_path / name).read_text())["tds"]["run"] for name in names]
    assert runs == [1, 2, 3] and len(read_traces(tmp_path)) == 1


def _train_without_a_folder(rank: int, place: str, breaks_at: int) -> tuple[list[str], list[bool]]:
    """Train three steps; rank 1 cannot write its trace from the start or from step ``breaks_at``."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tds").addHandler(handler)
    plot.draw = lambda *_: None
    folder = Path(place) / ("other" if rank else "trace")
    if rank and breaks_at == 0:
        folder.write_text("not a folder")
    toy = Toy("chain", pipeline={"trace": str(folder)})
    engine = make_engine(toy, 2)
    wants = []
    for step in range(3):
        if rank and step == breaks_at:
            (folder / "trace-rank1.json").unlink(missing_ok=True) if step else None
        engine.train_batch(iter(toy.batches()))
        wants.append(engine._monitor._tracing.records_step)
    return [line for line in heard if "without a trace" in line], wants


@pytest.mark.parametrize("breaks_at", [0, 1])
def test_a_trace_that_cannot_be_written_is_told_once_and_ends_nothing(breaks_at: int, tmp_path: Path) -> None:
    (lines, wants), (others, ended) = run_ranks(2, _train_without_a_folder, str(tmp_path), breaks_at)
    assert lines == [] and wants == [True] * 3
    assert len(others) == 1 and "rank 1 continues without a trace" in others[0] and "Error" in others[0]
    assert ended == [step < breaks_at for step in range(3)]


def test_a_program_that_drew_its_own_picture_gets_no_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "_drawn_elsewhere", set())
    _write(tmp_path, 0)
    plot.leave_picture(str(tmp_path))
    plot.draw(tmp_path)
    assert not (tmp_path / plot.PICTURE).exists()


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"trace": 3}, "must be the name of a folder, got 3"),
        ({"trace": ""}, "must be the name of a folder"),
        ({"trace": "x", "trace_steps": 0}, "1 or more, got 0"),
        ({"trace": "x", "trace_steps": True}, "1 or more, got True"),
        ({"trace_steps": 3}, 'no effect without "trace"'),
    ],
)
def test_a_wrong_trace_setting_is_told(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trace_window.asked_window(section)


def test_the_window_is_twenty_steps_unless_told() -> None:
    assert trace_window.asked_window({"trace": "x"}) == ("x", 20) and trace_window.asked_window({}) is None


def test_a_picture_that_cannot_be_drawn_is_told_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "PATIENCE_S", 0.0)
    with caplog.at_level(logging.WARNING, "tds"):
        plot.draw(tmp_path)
        (tmp_path / "trace-rank0.json").write_text("{")
        plot.draw(tmp_path)
    assert [record.message.split("(")[1].split(":")[0] for record in caplog.records] == [
        "FileNotFoundError",
        "ValueError",
    ]
    assert all("draw_schedule.py --trace" in record.message for record in caplog.records)


def test_the_picture_is_drawn_once_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Path] = []
    monkeypatch.setattr(plot, "draw", drawn.append)
    owner = HostClock()  # anything that can go
    own = trace_window.Tracing(owner, str(tmp_path), 1, 0, {"stage": 0, "replica": 0}, origin_ns=0, offset_ns=0)
    own.write([], step=0, schedule="1f1b", num_micro_batches=1)
    assert not own.records_step and drawn == []
    own.close()
    own.close()
    del owner
    assert drawn == [tmp_path]


def test_a_trace_becomes_a_picture(tmp_path: Path) -> None:
    _write(tmp_path, 0)
    plot.draw(tmp_path)
    assert (tmp_path / plot.PICTURE).read_bytes().startswith(b"\x89PNG")

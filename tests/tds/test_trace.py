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
from tds.trace import TraceFile, event_name, events, read_traces
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine

MAX_COST_S = 20e-6
METADATA = {"stage": 0, "num_stages": 1, "num_chunks": 1, "replica": 0, "tensor_rank": 0, "run": 1}


def _cost_per_action_s(num_actions: int = 2000) -> float:
    """Return the best of five loops: others share the machine."""
    best_s = float("inf")
    for _ in range(5):
        communicator = SimpleNamespace(clock=HostClock(), waits=[(1, 2)] * 4)
        recorder = Recorder(communicator)
        action = Forward(3)
        start = time.perf_counter()
        for _ in range(num_actions):
            recorder.before()
            communicator.waits.append((3, 4))
            recorder.after(action)
        best_s = min(best_s, (time.perf_counter() - start) / num_actions)
    return best_s


def test_recording_action_costs_at_most_20_us() -> None:
    cost_s = _cost_per_action_s()
    print(f"a recorded action costs {cost_s * 1e6:.2f} us")
    assert cost_s < MAX_COST_S


def test_recorder_returns_waits_and_work_time_per_action() -> None:
    communicator = SimpleNamespace(clock=HostClock(), waits=[])
    recorder = Recorder(communicator)
    recorder.before()
    before = time.perf_counter_ns()
    after = time.perf_counter_ns() + 1
    communicator.waits.append((before, after))
    recorder.after(Forward(0))
    recorder.before()
    recorder.after(Backward(0))
    first, second = recorder.drain()
    assert first.waits == ((before, after),) and first.compute_start_ns == after and not second.waits
    assert first.work_ns == first.end_ns - first.start_ns - (after - before)
    assert recorder.drain() == []


def test_event_names_match_plot_labels() -> None:
    actions = [Forward(3), Backward(3), BackwardInput(0, 1), BackwardWeight(12, 2)]
    assert [event_name(action) for action in actions] == ["F3", "B3", "I0.1", "W12.2"]


def _train(rank: int, folder: str | None, schedule: str, steps: int, fail_step: int | None) -> dict[str, int]:
    pipeline = {"schedule": schedule} | ({} if folder is None else {"trace": folder, "trace_steps": 2})
    toy = Toy("chain", pipeline=pipeline)
    plot.draw = lambda *_: None
    engine = make_engine(toy, 2)
    calls = {"before": 0, "after": 0}
    for name in calls:
        original_method = getattr(Recorder, name)

        def count_call(self: Any, *args: Any, name: str = name, original_method: Any = original_method) -> None:
            calls[name] += 1
            original_method(self, *args)

        setattr(Recorder, name, count_call)
    for step in range(steps):
        if step == fail_step:
            engine.on_micro_batch = _raise_at_second
        try:
            engine.train_batch(iter(toy.make_batches()))
        except ArithmeticError:
            return calls
    return calls


def _raise_at_second(index: int) -> None:
    if index == 2:
        raise ArithmeticError(index)


def test_recorder_is_not_called_without_trace() -> None:
    assert run_ranks(2, _train, None, "1f1b", 2, None) == [{"before": 0, "after": 0}] * 2


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_first_steps_are_written_and_read_back(schedule: str, tmp_path: Path) -> None:
    m = Toy("chain").num_micro_batches
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
    engine.train_batch(iter(toy.make_batches()))


def test_receives_follow_sends_on_aligned_clock(tmp_path: Path) -> None:
    """A forward begins to work once its message is there, which left at the end of the other stage's."""
    run_ranks(2, _train_with_naps, str(tmp_path))
    first, second = read_traces(tmp_path)[-1].timeline.spans
    sender_spans = {span.action.micro_batch: span for span in first if isinstance(span.action, Forward)}
    receiver_spans = {span.action.micro_batch: span for span in second if isinstance(span.action, Forward)}
    assert all(receiver_spans[i].start_s >= sender_spans[i].start_s + NAP_S for i in sender_spans)
    assert all(receiver_spans[i].end_s >= sender_spans[i].end_s for i in sender_spans)  # it naps as well


def test_actions_before_error_are_written(tmp_path: Path) -> None:
    run_ranks(1, _train_until_error, str(tmp_path))
    trace = json.loads((tmp_path / "trace-rank0.json").read_text())
    names = [e["name"] for e in trace["traceEvents"] if e["ph"] == "X" and e["args"]["step"] == 1]
    assert names == ["F0", "B0", "F1", "B1"]
    assert [step.step for step in read_traces(tmp_path)] == [0]


def _train_until_error(rank: int, folder: str) -> None:
    plot.draw = lambda *_: None
    toy = Toy("chain", pipeline={"trace": folder})
    engine = make_engine(toy, 1)
    engine.train_batch(iter(toy.make_batches()))
    engine.on_micro_batch = _raise_at_second
    with pytest.raises(ArithmeticError):
        engine.train_batch(iter(toy.make_batches()))


def _write_trace(folder: Path, rank: int, **metadata: Any) -> None:
    file = TraceFile(folder, rank, {**METADATA, **metadata})
    actions = [Work(Forward(0), 10, 30, ((12, 15),)), Work(Backward(0), 30, 50)]
    identity = {"replica": metadata.get("replica", 0), "stage": metadata.get("stage", 0), "origin_ns": 0}
    file.add(events(actions, step=0, schedule="1f1b", num_micro_batches=1, **identity))


def test_read_traces_skips_older_runs_and_rejects_missing_stages(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="trace-rank"):
        read_traces(tmp_path)
    _write_trace(tmp_path, 0, run=2)
    _write_trace(tmp_path, 1, run=1, stage=1, num_stages=2)
    (step,) = read_traces(tmp_path)
    assert step.costs.forward == pytest.approx((17e-9,)) and step.timeline.spans[0][0].end_s == pytest.approx(15e-9)
    _write_trace(tmp_path, 1, run=3, stage=1, num_stages=2)
    with pytest.raises(ValueError, match=r"each of 2 stages, got stages \[1\] of replica 0"):
        read_traces(tmp_path)
    (tmp_path / "trace-rank1.json").write_text('{"tds": {')
    with pytest.raises(ValueError, match="not a trace of tds, or it is truncated"):
        read_traces(tmp_path)


def test_restart_into_same_folder_backs_up_previous_traces(tmp_path: Path) -> None:
    for run in (1, 2, 3):
        _write_trace(tmp_path, 0, run=run)
    names = ["trace-rank0.json.1", "trace-rank0.json.2", "trace-rank0.json"]
    runs = [json.loads((tmp_path / name).read_text())["tds"]["run"] for name in names]
    assert runs == [1, 2, 3] and len(read_traces(tmp_path)) == 1


def _train_with_unwritable_trace(rank: int, root: str, fail_step: int) -> tuple[list[str], list[bool]]:
    """Train three steps; rank 1 cannot write its trace from the start or from step ``fail_step``."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tds").addHandler(handler)
    plot.draw = lambda *_: None
    folder = Path(root) / ("other" if rank else "trace")
    if rank and fail_step == 0:
        folder.write_text("not a folder")
    toy = Toy("chain", pipeline={"trace": str(folder)})
    engine = make_engine(toy, 2)
    recording_flags = []
    for step in range(3):
        if rank and step == fail_step:
            (folder / "trace-rank1.json").unlink(missing_ok=True) if step else None
        engine.train_batch(iter(toy.make_batches()))
        recording_flags.append(engine._monitor._tracing.records_step)
    return [line for line in messages if "without a trace" in line], recording_flags


@pytest.mark.parametrize("fail_step", [0, 1])
def test_unwritable_trace_warns_once_and_training_continues(fail_step: int, tmp_path: Path) -> None:
    (warnings, recording_flags), (other_warnings, other_flags) = run_ranks(
        2, _train_with_unwritable_trace, str(tmp_path), fail_step
    )
    assert warnings == [] and recording_flags == [True] * 3
    assert (
        len(other_warnings) == 1
        and "rank 1 continues without a trace" in other_warnings[0]
        and "Error" in other_warnings[0]
    )
    assert other_flags == [step < fail_step for step in range(3)]


def test_plot_is_not_drawn_after_program_disabled_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "_drawn_elsewhere", set())
    _write_trace(tmp_path, 0)
    plot.disable_drawing(str(tmp_path))
    plot.draw(tmp_path)
    assert not (tmp_path / plot.PICTURE_NAME).exists()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"trace": 3}, "must be the name of a folder, got 3"),
        ({"trace": ""}, "must be the name of a folder"),
        ({"trace": "x", "trace_steps": 0}, "trace_steps.* must be a positive integer, got 0"),
        ({"trace": "x", "trace_steps": True}, "trace_steps.* must be a positive integer, got True"),
        ({"trace_steps": 3}, 'no effect without "trace"'),
    ],
)
def test_invalid_trace_settings_raise(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace_window.parse_trace_window(section)


def test_trace_window_defaults_to_20_steps() -> None:
    assert trace_window.parse_trace_window({"trace": "x"}) == ("x", 20) and trace_window.parse_trace_window({}) is None


def test_failed_plot_warns_and_does_not_raise(
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


def test_plot_is_drawn_once_on_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Path] = []
    monkeypatch.setattr(plot, "draw", drawn.append)
    owner = HostClock()  # anything that can go
    tracing = trace_window.Tracing(owner, str(tmp_path), 1, 0, {"stage": 0, "replica": 0}, origin_ns=0, offset_ns=0)
    tracing.write([], step=0, schedule="1f1b", num_micro_batches=1)
    assert not tracing.records_step and drawn == []
    tracing.close()
    tracing.close()
    del owner
    assert drawn == [tmp_path]


def test_trace_is_plotted_as_png(tmp_path: Path) -> None:
    _write_trace(tmp_path, 0)
    plot.draw(tmp_path)
    assert (tmp_path / plot.PICTURE_NAME).read_bytes().startswith(b"\x89PNG")

"""Traces of ``"pipeline": {"trace": "DIR"}``: one Chrome/Perfetto file per rank.

An action is an event ``F3`` (forward of micro-batch 3), ``B3`` (backward), ``I3`` or ``W3`` (its halves), with the
suffix ``.1`` for chunk 1. Its wait for a message is an event ``wait`` before it. The file is valid JSON after each
step. It contains the first ``trace_steps`` steps (20 by default), so that long runs do not fill disks. Files from
earlier runs in the folder are renamed to ``trace-rank0.json.1``, ``.2`` and so on, the newest last.

Times are microseconds since rank 0 built its engine. Ranks on one host share a clock; times on different hosts are as
comparable as their wall clocks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tds.action_times import Durations, Work, costs_of, medians
from tds.schedule import LOOP, Action, Backward, BackwardInput, BackwardWeight, Costs, Forward, Span, Timeline

DEFAULT_STEPS = 20
LETTERS: dict[type[Action], tuple[str, str]] = {
    Forward: ("F", "forward"),
    Backward: ("B", "backward"),
    BackwardInput: ("I", "backward_input"),
    BackwardWeight: ("W", "backward_weight"),
}
_ACTIONS = {category: action_type for action_type, (_, category) in LETTERS.items()}
_END = "\n]}\n"


def event_name(action: Action) -> str:
    """Return an action's event name, such as "F3", or "F3.1" in chunk 1."""
    letter, _ = LETTERS[type(action)]
    return f"{letter}{action.micro_batch}" + (f".{action.chunk}" if action.chunk else "")


def events(
    work: Iterable[Work], *, step: int, schedule: str, num_micro_batches: int, replica: int, stage: int, origin_ns: int
) -> Iterator[dict[str, Any]]:
    """Yield one step's events: its metadata, then each action's waits and event.

    Args:
        origin_ns: zero point for event times, on the clock of ``work``.
    """
    position = {"pid": replica, "tid": stage}
    for index, item in enumerate(work):
        if index == 0:
            metadata = {"step": step, "schedule": schedule, "num_micro_batches": num_micro_batches}
            step_ts = _time(item.start_ns, item.start_ns, origin_ns)["ts"]
            yield {
                "ph": "i",
                "name": f"step {step}",
                "cat": "step",
                "s": "t",
                **position,
                "ts": step_ts,
                "args": metadata,
            }
        args = {"micro_batch": item.action.micro_batch, "chunk": item.action.chunk, "step": step}
        for wait_start, wait_end in item.waits:
            times = _time(wait_start, wait_end, origin_ns)
            yield {"ph": "X", "name": "wait", "cat": "wait", **position, **times, "args": args}
        times = _time(item.compute_start_ns, item.end_ns, origin_ns)
        action_args = {**args, "work": item.work_ns / 1e3}
        name, category = event_name(item.action), LETTERS[type(item.action)][1]
        yield {"ph": "X", "name": name, "cat": category, **position, **times, "args": action_args}


def _time(start_ns: int, end_ns: int, origin_ns: int) -> dict[str, float]:
    return {"ts": (start_ns - origin_ns) / 1e3, "dur": (end_ns - start_ns) / 1e3}


class TraceFile:
    """One rank's trace file. It is only open while a step is written.

    Raises:
        OSError: the folder cannot be created or written.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, metadata: Mapping[str, Any]) -> None:
        self.path = Path(folder) / f"trace-rank{rank}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _back_up(self.path)
        header = json.dumps({"displayTimeUnit": "ms", "tds": dict(metadata)})
        pid, tid = metadata["replica"], metadata["stage"]
        name_events = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"replica {pid}"}},
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": f"stage {tid}"}},
        ]
        lines = ",\n".join(map(json.dumps, name_events))
        self.path.write_text(f'{header[:-1]}, "traceEvents": [\n{lines}{_END}')

    def add(self, new_events: Iterable[Mapping[str, Any]]) -> None:
        """Append events; the file is valid JSON afterwards."""
        text = "".join(f",\n{json.dumps(event)}" for event in new_events)
        with self.path.open("r+b") as file:
            file.seek(-len(_END), os.SEEK_END)
            file.write((text + _END).encode())


def _back_up(path: Path) -> None:
    """Rename an earlier run's file to the next free number; ``read_traces`` ignores files with a number."""
    if not path.exists():
        return
    suffix = 1
    while (backup := path.with_name(f"{path.name}.{suffix}")).exists():
        suffix += 1
    path.rename(backup)


@dataclass(frozen=True)
class MeasuredStep:
    """A replica's measured training step, over all stages.

    ``timeline`` starts with the first action; waits are gaps. ``costs`` are medians over the step's micro-batches; a
    full backward counts as ``backward_input``.
    """

    step: int
    replica: int
    schedule: str
    num_chunks: int
    num_micro_batches: int
    timeline: Timeline
    costs: Costs
    placement: str = LOOP


def read_traces(folder: str | os.PathLike[str]) -> list[MeasuredStep]:
    """Read the complete steps of the newest run in ``folder``, by replica and then step.

    Raises:
        FileNotFoundError: there is no trace.
        ValueError: a file is not a trace, a stage's file is missing, or no step is complete.
    """
    paths = sorted(Path(folder).glob("trace-rank*.json"))
    if not paths:
        raise FileNotFoundError(
            f'a trace needs files trace-rank*.json, got none in {folder}. Train with "pipeline": {{"trace": DIR}}.'
        )
    traces = [_read(path) for path in paths]
    newest = max(trace["tds"]["run"] for trace in traces)
    replicas: dict[int, dict[int, dict[str, Any]]] = {}
    for trace in traces:
        metadata = trace["tds"]
        if metadata["run"] == newest and metadata["tensor_rank"] == 0:
            replicas.setdefault(metadata["replica"], {})[metadata["stage"]] = trace
    measured = [step for replica, stages in sorted(replicas.items()) for step in _steps(replica, stages, folder)]
    if not measured:
        raise ValueError(
            f"no step in {folder} is complete: the run ended during its first step. Train at least one step."
        )
    return measured


def _read(path: Path) -> dict[str, Any]:
    try:
        trace = json.loads(path.read_text())
        trace["tds"]["run"], trace["traceEvents"]  # noqa: B018 - raises KeyError if missing
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a trace of tds, or it is truncated ({error}). Remove it or trace again."
        ) from error
    return trace


def _steps(replica: int, traces_by_stage: Mapping[int, dict[str, Any]], folder: Any) -> Iterator[MeasuredStep]:
    metadata = next(iter(traces_by_stage.values()))["tds"]
    if set(traces_by_stage) != set(range(metadata["num_stages"])):
        raise ValueError(
            f"a trace needs one file trace-rank*.json for each of {metadata['num_stages']} stages, got stages "
            f"{sorted(traces_by_stage)} of replica {replica} in {folder}. Copy the files of all hosts into one folder."
        )
    stages = [_by_step(traces_by_stage[stage]) for stage in sorted(traces_by_stage)]
    for step_idx in sorted(set(stages[0]).intersection(*stages[1:])):
        chunks = metadata["num_chunks"], metadata.get("placement", LOOP)
        step = _measured(step_idx, replica, [rows[step_idx] for rows in stages], *chunks)
        if step is not None:
            yield step


def _by_step(trace: Mapping[str, Any]) -> dict[int, list[dict[str, Any]]]:
    steps: dict[int, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] != "M":
            steps.setdefault(event["args"]["step"], []).append(event)
    return steps


def _measured(
    step_idx: int, replica: int, stages: list[list[dict[str, Any]]], num_chunks: int, placement: str
) -> MeasuredStep | None:
    """Build one step from each stage's events; None if a stage did not complete it."""
    metadata = stages[0][0]["args"]
    actions = [[e for e in row if e["cat"] in _ACTIONS] for row in stages]
    num_backwards = [sum(e["cat"] in ("backward", "backward_weight") for e in row) for row in actions]
    if any(count != metadata["num_micro_batches"] * num_chunks for count in num_backwards):
        return None
    origin = min(e["ts"] for row in actions for e in row)
    work: list[Durations] = [{} for _ in stages]
    for durations, row in zip(work, actions, strict=True):
        for e in row:
            durations.setdefault((_ACTIONS[e["cat"]], e["args"]["chunk"]), []).append(e["args"]["work"] * 1e-6)
    spans = tuple(tuple(Span(_action(e), *_span_seconds(e, origin)) for e in row) for row in actions)
    costs = costs_of([medians(durations) for durations in work], num_chunks, placement)
    names = metadata["schedule"], num_chunks, metadata["num_micro_batches"]
    return MeasuredStep(step_idx, replica, *names, Timeline(spans), costs, placement)


def _action(event: Mapping[str, Any]) -> Action:
    return _ACTIONS[event["cat"]](event["args"]["micro_batch"], event["args"]["chunk"])


def _span_seconds(event: Mapping[str, Any], origin: float) -> tuple[float, float]:
    return (event["ts"] - origin) * 1e-6, (event["ts"] + event["dur"] - origin) * 1e-6

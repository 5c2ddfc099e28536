"""What the ranks of a run have recorded over all of its starts, and what must be true of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.kill_parts.cases import Case
from megatron.training.metrics import read_metrics

Number = tuple[int, int]


@dataclass
class Start:
    """One start of a run; a rank that was killed early has told nothing.

    Args:
        begins: rank -> the step it goes on after.
        loaded: rank -> name of the checkpoint it has taken up.
        steps: rank -> step -> (loss, checksums of the samples read).
        durable: steps of the checkpoints that it has told the launcher of.
        times: of each step that any rank has done, as ``time.time()``.
    """

    begins: dict[int, int] = field(default_factory=dict)
    loaded: dict[int, str | None] = field(default_factory=dict)
    steps: dict[int, dict[int, tuple[str, tuple[int, ...]]]] = field(default_factory=dict)
    durable: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return max((step for steps in self.steps.values() for step in steps), default=0)


def read_starts(record: Path) -> dict[Number, Start]:
    """Return the starts by (life of the launcher, start in it), in the order of time."""
    starts: dict[Number, Start] = {}
    for path in record.glob("rank-*.jsonl"):
        rank = int(path.stem.removeprefix("rank-"))
        for line in path.read_bytes().splitlines():
            _add(starts, rank, json.loads(line))
    return dict(sorted(starts.items()))


def _add(starts: dict[Number, Start], rank: int, line: dict) -> None:
    start = starts.setdefault(tuple(line["start"]), Start())
    if "begins" in line:
        start.begins[rank], start.loaded[rank] = line["begins"], line["loaded"]
    elif "step" in line:
        start.steps.setdefault(rank, {})[line["step"]] = (line["loss"], tuple(line["tokens"]))
        start.times.append(line["at"])
    else:
        start.durable.append(line["durable"])


def lost_steps(starts: dict[Number, Start]) -> Iterator[int]:
    """Yield, for each start but the first that came so far as to load, the steps that it does again."""
    done = 0
    for index, start in enumerate(starts.values()):
        if index and start.begins:
            yield done - min(start.begins.values())
        done = max(done, start.last_step)


def losses(folder: Path) -> list[tuple[int, str, str]]:
    """Return (step, loss, gradient norm) of the metrics of a run, as hexadecimal numbers."""
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    return [(r["step"], float(r["loss"]).hex(), float(r["grad_norm"]).hex()) for r in records]


def problems(case: Case, starts: dict[Number, Start], whole: Start) -> Iterator[str]:
    """Yield what the starts of a run have done that the undisturbed run ``whole`` has not."""
    yield from _steps_that_differ(starts, whole)
    yield from _detours(case, starts)
    yield from _samples_lost(case, starts, whole)


def _steps_that_differ(starts: dict[Number, Start], whole: Start) -> Iterator[str]:
    for number, start in starts.items():
        for rank, steps in start.steps.items():
            for step, (loss, tokens) in steps.items():
                wanted_loss, wanted_tokens = whole.steps[rank].get(step, ("none", ()))
                if loss != wanted_loss:
                    yield f"start {number}, rank {rank}: the loss of step {step} is {loss}, undisturbed {wanted_loss}"
                if tokens != wanted_tokens:
                    yield f"start {number}, rank {rank}: step {step} has read other samples than undisturbed"


def _detours(case: Case, starts: dict[Number, Start]) -> Iterator[str]:
    """Each start goes on, all ranks alike, from what was durable, and a kill costs a save interval at most."""
    done = durable = 0
    for number, start in starts.items():
        for begin in set(start.begins.values()):
            if len(set(start.begins.values())) > 1:
                yield f"start {number}: ranks go on after different steps: {start.begins}"
            if begin < durable:
                yield f"start {number} goes on after step {begin}, though the checkpoint of step {durable} was durable"
            if done - begin > case.most_lost:
                yield f"start {number} goes on after step {begin}: {done - begin} steps of {done} are lost"
        for rank, name in start.loaded.items():
            if start.begins[rank] != (int(name.split("-")[1]) if name else 0):
                yield f"start {number}, rank {rank}: goes on after step {start.begins[rank]} with {name}"
        done = max(done, start.last_step)
        durable = max([durable, *start.durable])


def _samples_lost(case: Case, starts: dict[Number, Start], whole: Start) -> Iterator[str]:
    """What counts of a start are the steps up to where the next one goes on; together they read each sample once."""
    for rank in whole.steps:
        path: list[tuple[int, ...]] = []
        for number, start in starts.items():
            if rank in start.begins:
                if start.begins[rank] > len(path):
                    yield f"start {number}, rank {rank}: goes on after step {start.begins[rank]}, {len(path)} are done"
                    break
                del path[start.begins[rank] :]
            path += [tokens for _, (_, tokens) in sorted(start.steps.get(rank, {}).items())]
        read = Counter(sum(path, ()))
        wanted = Counter(sum((tokens for _, (_, tokens) in sorted(whole.steps[rank].items())), ()))
        if read != wanted or any(times > 1 for times in read.values()):
            lost, repeated = sum((wanted - read).values()), sum((read - wanted).values())
            yield f"rank {rank}: {lost} samples lost, {repeated} repeated over {case.steps} steps"

"""--profile: traces and operators of the steps that were asked for, and the same numbers as without."""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config.logging import LoggingConfig
from megatron.mpu.groups import build_grid
from megatron.mpu.topology import Topology
from megatron.training.callbacks import profiler as callbacks_profiler
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.callbacks.profiler import Operator, joined, operators_of, table
from tests.helpers.harness import run_ranks
from tests.helpers.runs import flags, train_ranks

PIPELINE = "--pipe-parallel-size 2 --train-iters 4 --eval-iters 0"


def losses(folder: Path) -> list[tuple[str, str]]:
    records = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]
    return [(record["loss"].hex(), record["grad_norm"].hex()) for record in records]


def steps_in(trace: Path) -> set[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    return {event["name"] for event in events if str(event.get("name", "")).startswith("step ")}


@pytest.mark.slow
def test_a_profile_holds_its_steps_of_every_rank_and_changes_no_bit(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train_ranks(2, flags(corpus, tmp_path / "plain", PIPELINE))[0] == [0, 0]
    capfd.readouterr()
    assert train_ranks(2, flags(corpus, tmp_path / "run", f"{PIPELINE} --profile 2-3"))[0] == [0, 0]
    assert len(losses(tmp_path / "run")) == 4 and losses(tmp_path / "run") == losses(tmp_path / "plain")
    folder = tmp_path / "run" / "profile"
    assert {path.name for path in folder.iterdir()} == {"rank0.json.gz", "rank1.json.gz", "top.txt", "top.json"}
    for rank in (0, 1):
        assert steps_in(folder / f"rank{rank}.json.gz") == {"step 2", "step 3"}
    top = json.loads((folder / "top.json").read_text())
    assert (top["steps"], top["ranks"]) == (2, 2)
    times = [each["host_us"] for each in top["operators"]]
    assert times == sorted(times, reverse=True) and len(times) <= 40
    (products,) = [each for each in top["operators"] if each["name"] == "aten::mm"]
    assert products["calls"] >= 2 * 2 * 8 * 2
    text, shown = (folder / "top.txt").read_text(), capfd.readouterr().out
    assert "aten::mm" in text and f"profile of 2 steps: {folder}" in shown
    assert text.splitlines()[2].split()[0] in shown and not (tmp_path / "plain" / "profile").exists()


@pytest.mark.slow
def test_a_run_that_is_stopped_amidst_writes_what_there_is_and_one_behind_says_so(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = flags(corpus, tmp_path / "run", "--train-iters 6 --exit-interval 3 --profile 2-5 --eval-iters 0")
    assert train_ranks(1, argv)[0] == [75]
    assert steps_in(tmp_path / "run" / "profile" / "rank0.json.gz") == {"step 2", "step 3"}
    argv = flags(corpus, tmp_path / "run", f"--train-iters 6 --profile 2-5 --eval-iters 0 --load {tmp_path / 'run'}")
    capfd.readouterr()
    assert train_ranks(1, argv)[0] == [0]
    assert "--profile 2-5 begins before step 4" in capfd.readouterr().err
    assert steps_in(tmp_path / "run" / "profile" / "rank0.json.gz") == {"step 4", "step 5"}


class Recording:
    """A stand-in for torch's profile; ``error`` is what it ends with."""

    error: BaseException | None = None
    running = 0

    def __init__(self, activities: object) -> None:
        self.rows = [SimpleNamespace(key="aten::mm", count=1, self_cpu_time_total=1.0)]

    def start(self) -> None:
        Recording.running += 1

    def stop(self) -> None:
        Recording.running -= 1
        if Recording.error is not None:
            raise Recording.error

    def key_averages(self) -> list[SimpleNamespace]:
        return self.rows

    def export_chrome_trace(self, path: str) -> None:
        Path(path).touch()


def profiler(rank: int, folder: Path, ranks: int = 1) -> tuple[callbacks_profiler.Profiler, list[str]]:
    """Return the profiler of a run that does nothing, and what it says."""
    callbacks_profiler.profile = Recording  # type: ignore[assignment, misc]
    messages: list[str] = []
    run: Any = SimpleNamespace(
        samples=SimpleNamespace(step=0),
        config=SimpleNamespace(seeing=LoggingConfig(profile="3-4")),
        progress=SimpleNamespace(step=0),
        world=SimpleNamespace(rank=rank, kind="cpu", grid=build_grid(Topology.of_world(ranks, tensor=1, pipe=1), rank)),
        phases=SimpleNamespace(over=lambda phase: nullcontext()),
        print_line=messages.append,
        folder=folder,
    )
    made = callbacks_profiler.Profiler(run.config.seeing.profiled())
    made.trainer = run
    return made, messages


def take_step(found: callbacks_profiler.Profiler, step: int) -> None:
    found.trainer.samples.step = step + 1  # type: ignore[misc]
    found.on_step_start()
    found.on_after_update(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "written"),
    [
        ([0, 1, 2, 3, 2, 3, 4], [2, 2]),
        ([0, 1, 2, 1, 2, 3, 4], [2]),
        ([0, 1, 2, 2, 3, 4], [2]),
        ([0, 1, 2, 0, 1], []),
    ],
    ids=["behind it", "amidst it, to before it", "amidst it, to its first step", "never there again"],
)
def test_a_run_that_goes_back_has_a_profile_of_its_last_way_through(
    steps: list[int], written: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks_profiler, "profile", None)  # what ``profiler`` sets is undone
    monkeypatch.setattr(Recording, "running", 0)
    found, messages = profiler(0, tmp_path)
    for step in steps:
        take_step(found, step)
    assert Recording.running == 0
    taken = [line.split(":")[0] for line in messages if line.startswith("profile of")]
    assert taken == [f"profile of {number} steps" for number in written]


def end_badly(rank: int, folder: Path) -> list[str]:
    found, messages = profiler(rank, folder, ranks=2)
    Recording.error = ValueError("no events") if rank == 1 else None
    for step in (2, 3):
        take_step(found, step)
    return messages


def test_a_profile_that_fails_on_one_rank_is_that_of_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    messages, _ = run_ranks(2, end_badly, tmp_path)
    assert "aten::mm" in messages[0] and messages[1].startswith("profile of 2 steps")
    assert "the profile could not be recorded or written (ValueError: no events)" in capfd.readouterr().err


def test_times_of_ranks_add_up_and_devices_count_first() -> None:
    one = [Operator("a", 2, 30.0, 0.0), Operator("b", 1, 20.0, 0.0)]
    assert joined([one, one]) == [Operator("a", 4, 60.0, 0.0), Operator("b", 2, 40.0, 0.0)]
    on_device = [*one, Operator("kernel", 1, 0.0, 5.0)]
    assert [each.name for each in joined([on_device])] == ["kernel", "a", "b"]


def test_the_table_is_of_one_step_of_one_rank() -> None:
    operators = [Operator("a", 8, 6000.0, 0.0), Operator("b", 4, 2000.0, 0.0)]
    head, note, first, second = table(operators, steps=2, ranks=2).splitlines()
    assert head.split() == ["operator", "host", "ms", "share", "calls"] and "per step and rank" in note
    assert first.split() == ["a", "1.500", "75.0", "%", "2.0"] and second.split() == ["b", "0.500", "25.0", "%", "1.0"]
    assert table(operators[:1], 2, 2, of=operators).splitlines()[2].split()[2] == "75.0"
    with_device = table([Operator("k", 1, 0.0, 3000.0), *operators], 1, 1).splitlines()
    assert with_device[0].split()[:3] == ["operator", "device", "ms"]
    assert with_device[2].split()[:3] == ["k", "3.000", "100.0"]


def test_marks_of_steps_are_no_operators() -> None:
    rows = [SimpleNamespace(key=key, count=1, self_cpu_time_total=1.0) for key in ("aten::mm", "step 3")]
    assert [each.name for each in operators_of(rows)] == ["aten::mm"]

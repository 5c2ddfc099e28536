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
from megatron.training.callbacks.profiler import Operator, format_table, operators_of, sum_over_ranks
from tests.helpers.harness import run_ranks
from tests.helpers.runs import make_flags, train_ranks

PIPELINE_FLAGS = "--pipe-parallel-size 2 --train-iters 4 --eval-iters 0"


def read_losses(folder: Path) -> list[tuple[str, str]]:
    records = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]
    return [(record["loss"].hex(), record["grad_norm"].hex()) for record in records]


def traced_steps(trace: Path) -> set[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    return {event["name"] for event in events if str(event.get("name", "")).startswith("step ")}


@pytest.mark.slow
def test_profile_records_steps_of_all_ranks_and_preserves_losses(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train_ranks(2, make_flags(corpus, tmp_path / "plain", PIPELINE_FLAGS))[0] == [0, 0]
    capfd.readouterr()
    assert train_ranks(2, make_flags(corpus, tmp_path / "run", f"{PIPELINE_FLAGS} --profile 2-3"))[0] == [0, 0]
    assert len(read_losses(tmp_path / "run")) == 4 and read_losses(tmp_path / "run") == read_losses(tmp_path / "plain")
    folder = tmp_path / "run" / "profile"
    assert {path.name for path in folder.iterdir()} == {"rank0.json.gz", "rank1.json.gz", "top.txt", "top.json"}
    for rank in (0, 1):
        assert traced_steps(folder / f"rank{rank}.json.gz") == {"step 2", "step 3"}
    top = json.loads((folder / "top.json").read_text())
    assert (top["steps"], top["ranks"]) == (2, 2)
    host_times = [operator["host_us"] for operator in top["operators"]]
    assert host_times == sorted(host_times, reverse=True) and len(host_times) <= 40
    (matmul,) = [operator for operator in top["operators"] if operator["name"] == "aten::mm"]
    assert matmul["calls"] >= 2 * 2 * 8 * 2
    text, output = (folder / "top.txt").read_text(), capfd.readouterr().out
    assert "aten::mm" in text and f"profile of 2 steps: {folder}" in output
    assert text.splitlines()[2].split()[0] in output and not (tmp_path / "plain" / "profile").exists()


@pytest.mark.slow
def test_stopped_run_writes_partial_profile_and_missed_start_warns(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = make_flags(corpus, tmp_path / "run", "--train-iters 6 --exit-interval 3 --profile 2-5 --eval-iters 0")
    assert train_ranks(1, argv)[0] == [75]
    assert traced_steps(tmp_path / "run" / "profile" / "rank0.json.gz") == {"step 2", "step 3"}
    argv = make_flags(
        corpus, tmp_path / "run", f"--train-iters 6 --profile 2-5 --eval-iters 0 --load {tmp_path / 'run'}"
    )
    capfd.readouterr()
    assert train_ranks(1, argv)[0] == [0]
    assert "--profile 2-5 begins before step 4" in capfd.readouterr().err
    assert traced_steps(tmp_path / "run" / "profile" / "rank0.json.gz") == {"step 4", "step 5"}


class FakeProfile:
    """A stand-in for torch's profile; ``error`` is what it ends with."""

    error: BaseException | None = None
    num_running = 0

    def __init__(self, activities: object) -> None:
        self.rows = [SimpleNamespace(key="aten::mm", count=1, self_cpu_time_total=1.0)]

    def start(self) -> None:
        FakeProfile.num_running += 1

    def stop(self) -> None:
        FakeProfile.num_running -= 1
        if FakeProfile.error is not None:
            raise FakeProfile.error

    def key_averages(self) -> list[SimpleNamespace]:
        return self.rows

    def export_chrome_trace(self, path: str) -> None:
        Path(path).touch()


def make_profiler(rank: int, folder: Path, num_ranks: int = 1) -> tuple[callbacks_profiler.Profiler, list[str]]:
    """Return the profiler of a run that does nothing, and what it says."""
    callbacks_profiler.profile = FakeProfile  # type: ignore[assignment, misc]
    messages: list[str] = []
    run: Any = SimpleNamespace(
        samples=SimpleNamespace(step=0),
        config=SimpleNamespace(logging=LoggingConfig(profile="3-4")),
        progress=SimpleNamespace(step=0),
        world=SimpleNamespace(
            rank=rank, device_type="cpu", grid=build_grid(Topology.from_world_size(num_ranks, tensor=1, pipe=1), rank)
        ),
        phases=SimpleNamespace(during=lambda phase: nullcontext()),
        print_line=messages.append,
        folder=folder,
    )
    new_profiler = callbacks_profiler.Profiler(run.config.logging.profiled_steps())
    new_profiler.trainer = run
    return new_profiler, messages


def run_step(tested_profiler: callbacks_profiler.Profiler, step: int) -> None:
    tested_profiler.trainer.samples.step = step + 1  # type: ignore[misc]
    tested_profiler.on_step_start()
    tested_profiler.on_after_update(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "written_counts"),
    [
        ([0, 1, 2, 3, 2, 3, 4], [2, 2]),
        ([0, 1, 2, 1, 2, 3, 4], [2]),
        ([0, 1, 2, 2, 3, 4], [2]),
        ([0, 1, 2, 0, 1], []),
    ],
    ids=["behind it", "amidst it, to before it", "amidst it, to its first step", "never there again"],
)
def test_restored_run_profiles_last_repetition_of_steps(
    steps: list[int], written_counts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks_profiler, "profile", None)  # what ``make_profiler`` sets is undone
    monkeypatch.setattr(FakeProfile, "num_running", 0)
    tested_profiler, messages = make_profiler(0, tmp_path)
    for step in steps:
        run_step(tested_profiler, step)
    assert FakeProfile.num_running == 0
    profile_lines = [line.split(":")[0] for line in messages if line.startswith("profile of")]
    assert profile_lines == [f"profile of {num_steps} steps" for num_steps in written_counts]


def run_failing_profile(rank: int, folder: Path) -> list[str]:
    tested_profiler, messages = make_profiler(rank, folder, num_ranks=2)
    FakeProfile.error = ValueError("no events") if rank == 1 else None
    for step in (2, 3):
        run_step(tested_profiler, step)
    return messages


def test_profile_failing_on_one_rank_is_written_by_other_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    messages, _ = run_ranks(2, run_failing_profile, tmp_path)
    assert "aten::mm" in messages[0] and messages[1].startswith("profile of 2 steps")
    assert "the profile could not be recorded or written (ValueError: no events)" in capfd.readouterr().err


def test_operator_times_sum_over_ranks_and_sort_by_device_time() -> None:
    rank_operators = [Operator("a", 2, 30.0, 0.0), Operator("b", 1, 20.0, 0.0)]
    assert sum_over_ranks([rank_operators, rank_operators]) == [
        Operator("a", 4, 60.0, 0.0),
        Operator("b", 2, 40.0, 0.0),
    ]
    with_kernel = [*rank_operators, Operator("kernel", 1, 0.0, 5.0)]
    assert [operator.name for operator in sum_over_ranks([with_kernel])] == ["kernel", "a", "b"]


def test_table_shows_means_per_step_and_rank() -> None:
    operators = [Operator("a", 8, 6000.0, 0.0), Operator("b", 4, 2000.0, 0.0)]
    header, note, first, second = format_table(operators, num_steps=2, num_ranks=2).splitlines()
    assert header.split() == ["operator", "host", "ms", "share", "calls"] and "per step and rank" in note
    assert first.split() == ["a", "1.500", "75.0", "%", "2.0"] and second.split() == ["b", "0.500", "25.0", "%", "1.0"]
    assert format_table(operators[:1], 2, 2, all_operators=operators).splitlines()[2].split()[2] == "75.0"
    with_device = format_table([Operator("k", 1, 0.0, 3000.0), *operators], 1, 1).splitlines()
    assert with_device[0].split()[:3] == ["operator", "device", "ms"]
    assert with_device[2].split()[:3] == ["k", "3.000", "100.0"]


def test_step_marks_are_not_operators() -> None:
    rows = [SimpleNamespace(key=key, count=1, self_cpu_time_total=1.0) for key in ("aten::mm", "step 3")]
    assert [operator.name for operator in operators_of(rows)] == ["aten::mm"]

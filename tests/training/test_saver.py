"""When a run saves, what it does about a save that fails, and what it says of it."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpoint import Committed, RetentionPolicy, Staged
from megatron.checkpoint.retention import make_retention_policy
from megatron.config import CheckpointConfig, Config
from megatron.errors import CheckpointError
from megatron.mpu.groups import single_grid
from megatron.optim import build_optimizer
from megatron.training.callbacks import checkpointer
from megatron.training.callbacks.checkpointer import Checkpointer
from megatron.training.run_folder import RunPaths
from megatron.training.step_result import StepResult
from megatron.training.timeouts import SAVING, RunPhases
from megatron.training.train_progress import TrainProgress
from megatron.training.world import World
from tests.helpers.saved_states import save_state


class FakeCheckpointer(Checkpointer):
    """A checkpointer that writes nothing; ``saved_steps`` are the steps that it has saved or staged."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> None:
        super().__init__(RunPaths(folder, None))
        self.folder = folder
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.records: list[tuple[int, dict[str, Any]]] = []
        self.saved_steps: list[int] = []
        self.failed_steps: list[int] = []
        self.automatic_steps: list[int] = []
        self.save_end_steps: list[int] = []
        self.should_fail = self.is_requested = False
        self.progress, self.phases = TrainProgress(), RunPhases()
        trainer: Any = SimpleNamespace(
            stop_text="",
            config=SimpleNamespace(checkpoint=CheckpointConfig(**flags)),
            world=World("cpu", torch.device("cpu"), single_grid(), 0),
            progress=self.progress,
            phases=self.phases,
            folder=folder,
            print_line=self.lines.append,
            call=self.record_hook,
            request_save=self.record_request,
        )
        self.trainer = trainer
        monkeypatch.setattr(checkpointer.log, "error", self.errors.append)

    def record_request(self) -> None:
        self.is_requested = True

    def record_hook(self, hook: str, step: int, *hook_args: Any) -> None:
        """Record a call of ``on_save_staged(step, values)`` or ``on_save_end(step, path, values)``."""
        *path, values = hook_args
        assert hook == ("on_save_end" if path else "on_save_staged")
        self.records.append((step, values))
        if path and path[0] is not None:
            self.save_end_steps.append(step)

    def _write(self, is_automatic: bool) -> Path | Staged:
        step = self.progress.step
        if is_automatic:
            self.automatic_steps.append(step)
        if self.async_saver is not None:
            self.saved_steps.append(step)
            return Staged(step, 0.25, 1000)
        if self.should_fail:
            self.failed_steps.append(step)
            raise CheckpointError("the disk is full. Free some space, or move --save.")
        self.saved_steps.append(step)
        path = self.folder / f"step-{step:08d}"
        path.mkdir(parents=True)
        return path

    def requests_save(self) -> bool:
        """Return whether it asks for a save at the end of this step."""
        self.is_requested = False
        self.on_step_end(StepResult(1.0, 1.0, 1.0, False))
        return self.is_requested

    def run_step(self) -> None:
        """Take a step and save if that is due."""
        self.progress.step += 1
        if self.requests_save():
            self.on_save()

    def advance_clock(self, minutes: float) -> None:
        """Let so many minutes pass."""
        self.status.last_time -= 60 * minutes


class FakeAsyncSaver:
    """A background in which a save ends when the test says so."""

    def __init__(self) -> None:
        self.outcomes: deque[Committed | CheckpointError] = deque()

    def poll(self) -> Committed | None:
        if not self.outcomes:
            return None
        if isinstance(self.outcomes[0], CheckpointError):
            raise self.outcomes.popleft()  # type: ignore[misc]
        return self.outcomes.popleft()  # type: ignore[return-value]

    finish = poll


@pytest.mark.parametrize(
    ("flags", "elapsed_minutes", "is_saved"),
    [
        ({}, 29.9, False),
        ({}, 30.1, True),
        ({"save_interval": 50}, 1000.0, False),
        ({"save_interval": 50, "save_interval_minutes": 2.0}, 2.1, True),
        ({"save_interval_minutes": 0.0}, 1000.0, False),
    ],
)
def test_save_is_requested_after_interval_minutes(
    flags: dict[str, Any], elapsed_minutes: float, is_saved: bool, tmp_path: Path, monkeypatch
) -> None:
    saver = FakeCheckpointer(tmp_path, monkeypatch, **flags)
    saver.run_step()
    assert saver.saved_steps == []
    saver.advance_clock(elapsed_minutes)
    saver.run_step()
    assert saver.saved_steps == ([2] if is_saved else [])
    saver.run_step()
    assert saver.saved_steps == ([2] if is_saved else []), "the time counts from the last save on"


def test_only_default_interval_saves_are_automatic(tmp_path: Path, monkeypatch) -> None:
    saver = FakeCheckpointer(tmp_path, monkeypatch)
    saver.advance_clock(31)
    saver.run_step()
    saver.progress.step = 9
    saver.save_step()
    assert saver.automatic_steps == [1], "the last one of a run is always wanted"
    explicit = FakeCheckpointer(tmp_path / "asked", monkeypatch, save_interval_minutes=1.0)
    explicit.advance_clock(2)
    explicit.run_step()
    assert explicit.saved_steps == [1] and explicit.automatic_steps == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, RetentionPolicy(automatic=2)),
        ({"save_interval": 5, "keep_last": 3, "keep_every": 10}, RetentionPolicy(3, 10)),
    ],
)  # fmt: skip
def test_default_interval_has_separate_retention(flags: dict[str, Any], expected: RetentionPolicy) -> None:
    assert make_retention_policy(CheckpointConfig(**flags)) == expected


def test_step_is_saved_and_reported_once(tmp_path: Path, monkeypatch) -> None:
    saver = FakeCheckpointer(tmp_path, monkeypatch, save_interval=2)
    saver.run_step()
    saver.run_step()
    saver.save_step()
    assert (saver.saved_steps, saver.save_end_steps, saver.newest_step) == ([2], [2], 2)
    assert saver.lines == [f"step 2 | saved {saver.committed}"]
    ((step, values),) = saver.records
    assert step == 2 and values["save_stall_s"] == values["durable_s"] > 0
    assert 0 < values["save_stall_share"] <= 1


def test_failed_save_is_reported_and_run_continues(tmp_path: Path, monkeypatch) -> None:
    saver = FakeCheckpointer(tmp_path, monkeypatch, save_interval=1)
    saver.run_step()
    saver.should_fail = True
    saver.run_step()
    (message,) = saver.errors
    assert (
        "step 2: NOT SAVED: the disk is full. Free some space, or move --save. Older" in message and "00001" in message
    )
    assert saver.records[-1] == (2, {"failed": 1}) and saver.save_end_steps == [1]
    with pytest.raises(CheckpointError, match="disk is full"):
        saver.save_step()
    saver.should_fail = False
    saver.save_step()
    assert saver.saved_steps == [1, 2], "the last one of a run is tried again"


def test_failed_timed_save_is_retried_after_interval(tmp_path: Path, monkeypatch) -> None:
    saver = FakeCheckpointer(tmp_path, monkeypatch, save_interval_minutes=1.0)
    saver.should_fail = True
    for minutes in (1.1, 0.0, 0.0, 0.5, 0.6, 0.0):
        saver.advance_clock(minutes)
        saver.run_step()
    assert saver.failed_steps == [1, 5]


def test_on_save_error_stop_raises(tmp_path: Path, monkeypatch) -> None:
    saver = FakeCheckpointer(tmp_path, monkeypatch, save_interval=1, on_save_error="stop")
    saver.should_fail = True
    with pytest.raises(CheckpointError, match="disk is full"):
        saver.run_step()


def use_async_saver(saver: FakeCheckpointer) -> FakeAsyncSaver:
    disk = FakeAsyncSaver()
    saver.async_saver = disk  # type: ignore[assignment]
    return disk


def test_staged_and_durable_saves_are_reported_separately(tmp_path: Path, monkeypatch) -> None:
    saver = FakeCheckpointer(tmp_path, monkeypatch, save_interval=2)
    disk = use_async_saver(saver)
    saver.run_step()
    saver.run_step()
    assert saver.committed is None and saver.save_end_steps == []
    assert "staged" in saver.lines[0] and set(saver.records[0][1]) == {
        *("staged_s", "staged_bytes", "save_stall_s", "save_stall_share"),
    }
    disk.outcomes.append(Committed(2, tmp_path / "two", 3.5, 1000))
    saver.run_step()
    assert saver.committed == tmp_path / "two" and saver.save_end_steps == [2]
    assert saver.lines[1] == f"step 2 | durable 3.50 s after it was staged: saved {tmp_path / 'two'}"
    assert saver.records[1] == (2, {"durable_s": 3.5, "durable_bytes": 1000})
    saver.wait_for_save(raise_failure=True)
    assert len(saver.lines) == 2


def test_background_failure_is_reported_and_next_save_continues(tmp_path: Path, monkeypatch) -> None:
    saver = FakeCheckpointer(tmp_path, monkeypatch, save_interval=2)
    disk = use_async_saver(saver)
    for _ in range(2):
        saver.run_step()
    disk.outcomes.append(CheckpointError("the disk is full"))
    saver.run_step()
    assert len(saver.errors) == 1 and saver.newest_step == -1
    saver.wait_for_save(raise_failure=True)
    saver.run_step()
    assert saver.saved_steps == [2, 4] and saver.status.failure is None
    disk.outcomes.append(CheckpointError("the disk is full"))
    with pytest.raises(CheckpointError, match="disk is full"):
        saver.wait_for_save(raise_failure=True)


def test_wait_for_previous_save_uses_saving_phase_limit(tmp_path: Path, monkeypatch) -> None:
    saver, phase_names = FakeCheckpointer(tmp_path, monkeypatch, save_interval=2), []
    disk = use_async_saver(saver)
    monkeypatch.setattr(disk, "finish", lambda: phase_names.append(saver.phases.phase))
    for _ in range(4):
        saver.run_step()
    assert saver.saved_steps == [2, 4] and phase_names == [SAVING] * 2


def test_background_failure_does_not_raise_at_end_of_run(tmp_path: Path, monkeypatch) -> None:
    saver = FakeCheckpointer(tmp_path, monkeypatch, save_interval=2)
    disk = use_async_saver(saver)
    for _ in range(2):
        saver.run_step()
    disk.outcomes.append(CheckpointError("the disk is full"))
    saver.wait_for_save()
    assert len(saver.errors) == 1 and "step 2: NOT SAVED" in saver.errors[0]


def test_background_failure_with_stop_raises_on_all_ranks(tmp_path: Path, monkeypatch) -> None:
    saver, other_saver = (
        FakeCheckpointer(tmp_path, monkeypatch, save_interval=50, on_save_error="stop") for _ in range(2)
    )
    for current in (saver, other_saver):
        disk = use_async_saver(current)
        current.progress.step = 1
        current.save_step()
        current.progress.step = 2
        if current is saver:
            disk.outcomes.append(CheckpointError("the disk is full"))
            assert current.requests_save()
        else:
            assert not current.requests_save()
            disk.outcomes.append(CheckpointError("the disk is full"))  # it has not looked yet
        with pytest.raises(CheckpointError, match="disk is full"):
            current.on_save()


def test_save_during_step_raises(tmp_path: Path) -> None:
    """Row K30."""
    module = torch.nn.Linear(2, 1)
    optimizer = build_optimizer(module.parameters(), name="adamw", lr=0.1, weight_decay=0.0)
    world = World("cpu", torch.device("cpu"), single_grid(), 0)
    state_args: dict[str, Any] = {"config": Config(), "module": module, "optimizer": optimizer, "world": world}
    module(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="only between steps"):
        save_state(tmp_path, TrainProgress(), **state_args, fingerprint=None)
    optimizer.step()
    assert save_state(tmp_path, TrainProgress(), **state_args, fingerprint=None).name == "step-00000000"

"""When a run saves, what it does about a save that fails, and what it says of it."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpoint import Committed, RetentionPolicy, Staged
from megatron.checkpoint.retention import retention_of
from megatron.config import CheckpointConfig, Config
from megatron.errors import CheckpointError
from megatron.mpu.groups import single_grid
from megatron.optim import build_optimizer
from megatron.training.callbacks import checkpointer
from megatron.training.callbacks.checkpointer import Checkpointer
from megatron.training.run_folder import RunPaths
from megatron.training.step_result import StepResult
from megatron.training.timeouts import SAVING, Sections
from megatron.training.train_progress import TrainProgress
from megatron.training.world import World
from tests.helpers.saved_states import save_state


class Stand(Checkpointer):
    """A checkpointer that writes nothing; ``written`` are the steps that it has saved or staged."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> None:
        super().__init__(RunPaths(folder, None))
        self.folder = folder
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.records: list[tuple[int, dict[str, Any]]] = []
        self.written: list[int] = []
        self.attempts: list[int] = []
        self.automatic: list[int] = []
        self.save_ends: list[int] = []
        self.fails = self.is_asked = False
        self.progress, self.phases = TrainProgress(), Sections()
        trainer: Any = SimpleNamespace(
            stop_text="",
            config=SimpleNamespace(checkpoint=CheckpointConfig(**flags)),
            world=World("cpu", torch.device("cpu"), single_grid(), 0),
            progress=self.progress,
            phases=self.phases,
            folder=folder,
            print_line=self.lines.append,
            call=self.note_end,
            request_save=self.ask,
        )
        self.trainer = trainer
        monkeypatch.setattr(checkpointer.log, "error", self.errors.append)

    def ask(self) -> None:
        self.is_asked = True

    def note_end(self, hook: str, step: int, *given: Any) -> None:
        """Record a call of ``on_save_staged(step, values)`` or ``on_save_end(step, path, values)``."""
        *path, values = given
        assert hook == ("on_save_end" if path else "on_save_staged")
        self.records.append((step, values))
        if path and path[0] is not None:
            self.save_ends.append(step)

    def _write(self, is_automatic: bool) -> Path | Staged:
        step = self.progress.step
        if is_automatic:
            self.automatic.append(step)
        if self.async_saver is not None:
            self.written.append(step)
            return Staged(step, 0.25, 1000)
        if self.fails:
            self.attempts.append(step)
            raise CheckpointError("the disk is full. Free some space, or move --save.")
        self.written.append(step)
        path = self.folder / f"step-{step:08d}"
        path.mkdir(parents=True)
        return path

    def wants_save(self) -> bool:
        """Return whether it asks for a save at the end of this step."""
        self.is_asked = False
        self.on_step_end(StepResult(1.0, 1.0, 1.0, False))
        return self.is_asked

    def step(self) -> None:
        """Take a step and save if that is due."""
        self.progress.step += 1
        if self.wants_save():
            self.on_save()

    def later(self, minutes: float) -> None:
        """Let so many minutes pass."""
        self.status.last_time -= 60 * minutes


class Disk:
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
    ("flags", "passed", "saves"),
    [
        ({}, 29.9, False),
        ({}, 30.1, True),
        ({"save_interval": 50}, 1000.0, False),
        ({"save_interval": 50, "save_interval_minutes": 2.0}, 2.1, True),
        ({"save_interval_minutes": 0.0}, 1000.0, False),
    ],
)
def test_time_asks_for_a_save(flags: dict[str, Any], passed: float, saves: bool, tmp_path: Path, monkeypatch) -> None:
    run = Stand(tmp_path, monkeypatch, **flags)
    run.step()
    assert run.written == []
    run.later(passed)
    run.step()
    assert run.written == ([2] if saves else [])
    run.step()
    assert run.written == ([2] if saves else []), "the time counts from the last save on"


def test_a_save_knows_whether_anybody_asked_for_it(tmp_path: Path, monkeypatch) -> None:
    run = Stand(tmp_path, monkeypatch)
    run.later(31)
    run.step()
    run.progress.step = 9
    run.save_step()
    assert run.automatic == [1], "the last one of a run is always wanted"
    asked = Stand(tmp_path / "asked", monkeypatch, save_interval_minutes=1.0)
    asked.later(2)
    asked.step()
    assert asked.written == [1] and asked.automatic == []


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ({}, RetentionPolicy(automatic=2)),
        ({"save_interval": 5, "keep_last": 3, "keep_every": 10}, RetentionPolicy(3, 10)),
    ],
)  # fmt: skip
def test_only_the_default_interval_has_a_number_of_its_own(flags: dict[str, Any], kept: RetentionPolicy) -> None:
    assert retention_of(CheckpointConfig(**flags)) == kept


def test_a_step_is_saved_once_and_told_once(tmp_path: Path, monkeypatch) -> None:
    run = Stand(tmp_path, monkeypatch, save_interval=2)
    run.step()
    run.step()
    run.save_step()
    assert (run.written, run.save_ends, run.newest_step) == ([2], [2], 2)
    assert run.lines == [f"step 2 | saved {run.committed}"]
    ((step, values),) = run.records
    assert step == 2 and values["save_stall_s"] == values["durable_s"] > 0
    assert 0 < values["save_stall_share"] <= 1


def test_a_save_that_fails_in_mid_run_is_told_and_the_run_goes_on(tmp_path: Path, monkeypatch) -> None:
    run = Stand(tmp_path, monkeypatch, save_interval=1)
    run.step()
    run.fails = True
    run.step()
    (message,) = run.errors
    assert (
        "step 2: NOT SAVED: the disk is full. Free some space, or move --save. Older" in message and "00001" in message
    )
    assert run.records[-1] == (2, {"failed": 1}) and run.save_ends == [1]
    with pytest.raises(CheckpointError, match="disk is full"):
        run.save_step()
    run.fails = False
    run.save_step()
    assert run.written == [1, 2], "the last one of a run is tried again"


def test_by_time_a_save_that_failed_is_tried_again_after_the_interval_only(tmp_path: Path, monkeypatch) -> None:
    run = Stand(tmp_path, monkeypatch, save_interval_minutes=1.0)
    run.fails = True
    for minutes in (1.1, 0.0, 0.0, 0.5, 0.6, 0.0):
        run.later(minutes)
        run.step()
    assert run.attempts == [1, 5]


def test_on_save_error_stop_ends_the_run(tmp_path: Path, monkeypatch) -> None:
    run = Stand(tmp_path, monkeypatch, save_interval=1, on_save_error="stop")
    run.fails = True
    with pytest.raises(CheckpointError, match="disk is full"):
        run.step()


def background(run: Stand) -> Disk:
    disk = Disk()
    run.async_saver = disk  # type: ignore[assignment]
    return disk


def test_staged_and_durable_are_told_apart(tmp_path: Path, monkeypatch) -> None:
    run = Stand(tmp_path, monkeypatch, save_interval=2)
    disk = background(run)
    run.step()
    run.step()
    assert run.committed is None and run.save_ends == []
    assert "staged" in run.lines[0] and set(run.records[0][1]) == {
        *("staged_s", "staged_bytes", "save_stall_s", "save_stall_share"),
    }
    disk.outcomes.append(Committed(2, tmp_path / "two", 3.5, 1000))
    run.step()
    assert run.committed == tmp_path / "two" and run.save_ends == [2]
    assert run.lines[1] == f"step 2 | durable 3.50 s after it was staged: saved {tmp_path / 'two'}"
    assert run.records[1] == (2, {"durable_s": 3.5, "durable_bytes": 1000})
    run.wait_for_save(raise_failure=True)
    assert len(run.lines) == 2


def test_a_failure_in_the_background_is_told_and_the_next_save_goes_on(tmp_path: Path, monkeypatch) -> None:
    run = Stand(tmp_path, monkeypatch, save_interval=2)
    disk = background(run)
    for _ in range(2):
        run.step()
    disk.outcomes.append(CheckpointError("the disk is full"))
    run.step()
    assert len(run.errors) == 1 and run.newest_step == -1
    run.wait_for_save(raise_failure=True)
    run.step()
    assert run.written == [2, 4] and run.status.failure is None
    disk.outcomes.append(CheckpointError("the disk is full"))
    with pytest.raises(CheckpointError, match="disk is full"):
        run.wait_for_save(raise_failure=True)


def test_the_wait_for_the_save_before_is_under_the_limit_of_saving(tmp_path: Path, monkeypatch) -> None:
    run, names = Stand(tmp_path, monkeypatch, save_interval=2), []
    disk = background(run)
    monkeypatch.setattr(disk, "finish", lambda: names.append(run.phases.name))
    for _ in range(4):
        run.step()
    assert run.written == [2, 4] and names == [SAVING] * 2


def test_a_failure_in_the_background_does_not_hide_why_a_run_ends(tmp_path: Path, monkeypatch) -> None:
    run = Stand(tmp_path, monkeypatch, save_interval=2)
    disk = background(run)
    for _ in range(2):
        run.step()
    disk.outcomes.append(CheckpointError("the disk is full"))
    run.wait_for_save()
    assert len(run.errors) == 1 and "step 2: NOT SAVED" in run.errors[0]


def test_with_stop_a_failure_in_the_background_is_brought_to_all_ranks_by_the_vote(tmp_path: Path, monkeypatch) -> None:
    run, other = (Stand(tmp_path, monkeypatch, save_interval=50, on_save_error="stop") for _ in range(2))
    for each in (run, other):
        disk = background(each)
        each.progress.step = 1
        each.save_step()
        each.progress.step = 2
        if each is run:
            disk.outcomes.append(CheckpointError("the disk is full"))
            assert each.wants_save()
        else:
            assert not each.wants_save()
            disk.outcomes.append(CheckpointError("the disk is full"))  # it has not looked yet
        with pytest.raises(CheckpointError, match="disk is full"):
            each.on_save()


def test_no_save_in_the_midst_of_a_step(tmp_path: Path) -> None:
    """Row K30."""
    module = torch.nn.Linear(2, 1)
    optimizer = build_optimizer(module.parameters(), name="adamw", lr=0.1, weight_decay=0.0)
    world = World("cpu", torch.device("cpu"), single_grid(), 0)
    given: dict[str, Any] = {"config": Config(), "module": module, "optimizer": optimizer, "world": world}
    module(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="only between steps"):
        save_state(tmp_path, TrainProgress(), **given, fingerprint=None)
    optimizer.step()
    assert save_state(tmp_path, TrainProgress(), **given, fingerprint=None).name == "step-00000000"

"""What a stopped run says of how it goes on, and what signals mean to a rank without our launcher."""

from __future__ import annotations

import signal
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config import parse
from megatron.config.checkpoint import CheckpointConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.runtime import exit_guard, exit_signals
from megatron.runtime.exit_signals import (
    PARTIAL_RESTORE_FLAGS,
    REGROUP_REASON,
    REGROUP_VARIABLE,
    StopRequests,
    resume_advice,
)
from megatron.training import data
from megatron.training.callbacks.checkpointer import Checkpointer
from megatron.training.callbacks.evaluator import Evaluator
from megatron.training.restore_options import EVERYTHING, RestoreOptions
from megatron.training.train_progress import TrainProgress
from megatron.training.trainer import Trainer
from tests.helpers.harness import fork_ranks
from tests.helpers.runs import launch_script, make_flags

RUN_DIR = Path("runs/gpt2-1")
SCRIPT_ENV = {"MEGATRON_VARIABLES": "--save=CHECKPOINT_PATH"}
SLURM_ENV = {"SLURM_JOB_ID": "77"}
PAUSE = 0


@pytest.mark.parametrize(
    ("command", "env", "message"),
    [
        ("", {}, "Resume with the same command and --load runs/gpt2-1"),
        ("--save runs/gpt2-1 --train-iters 9", {}, "Resume with the same command and --load runs/gpt2-1"),
        ("", SCRIPT_ENV, "Resume with the same command of the run script and --load runs/gpt2-1"),
        ("--resume", SCRIPT_ENV, "the same command of the run script and --load runs/gpt2-1 in place of --resume"),
        ("--load old --finetune", {}, "--load runs/gpt2-1 in place of --load and --finetune"),
        ("--save=runs/gpt2-1 --resume", {}, "Resume with the same command as before"),
        ("--load runs/gpt2-1", {}, "Resume with the same command as before"),
        ("--save runs/../runs/gpt2-1/ --resume", {}, "Resume with the same command as before"),
        ("--load old --no-load-optim", {}, "--load runs/gpt2-1 in place of --load and --no-load-optim"),
        ("--load ./runs/gpt2-1 --no-load-rng", {}, "Resume with the same command without --no-load-rng"),
        (
            "--save runs/gpt2-1 --resume --load-weights-only",
            SLURM_ENV,
            "the same command without --load-weights-only; with",
        ),
        ("--load runs/gpt2-1 --finetune", {}, "Resume with the same command without --finetune"),
        ("", SLURM_ENV, "with --save runs/gpt2-1 --resume --load-if-exists a requeued job resumes by itself"),
        (
            "--save runs/gpt2-1 --resume --load-if-exists",
            SLURM_ENV,
            "the same command as before, or `scontrol requeue 77`",
        ),
    ],
)
def test_resume_advice_matches_command(command, env, message):
    assert message in resume_advice(RUN_DIR, command.split(), env)


def test_resume_advice_uses_script_defaults_and_quotes_paths():
    env = {"MEGATRON_DEFAULTS": "--load 'my run'"}
    assert resume_advice(Path("my run"), [], env) == "Resume with the same command as before"
    assert "--load 'my run'" in resume_advice(Path("my run"), [], {})


def test_waiting_node_joins_only_after_save(tmp_path, monkeypatch):
    regroup_path = tmp_path / "regroup"
    monkeypatch.setenv(REGROUP_VARIABLE, str(regroup_path))
    stop_requests = StopRequests()
    trainer: Any = SimpleNamespace(
        stop=stop_requests, progress=TrainProgress(step=3), world=SimpleNamespace(any_rank=list)
    )

    def agree(should_save: bool) -> tuple[str, bool]:
        trainer._is_save_requested = should_save
        return Trainer.agree(trainer)

    assert agree(True) == ("", True)
    regroup_path.touch()
    assert agree(False) == ("", False)
    assert agree(True) == (REGROUP_REASON, True)
    stop_requests.request("another reason")
    assert agree(True) == ("another reason", True)


def test_node_arriving_during_save_joins_at_next_save(tmp_path, monkeypatch):
    regroup_path, trainers = tmp_path / "regroup", [make_stub_trainer(3), make_stub_trainer(4)]
    monkeypatch.setenv(REGROUP_VARIABLE, str(regroup_path))
    for trainer in trainers:
        trainer.stop = StopRequests()
        trainer.call = lambda hook: regroup_path.touch()
        Trainer.end_step(trainer, None)
    assert [trainer.stop_text for trainer in trainers] == ["", REGROUP_REASON]


@pytest.mark.parametrize("is_held", [False, True], ids=["that fails", "that bad steps forbid"])
def test_failed_or_held_save_does_not_regroup(is_held, tmp_path, monkeypatch):
    """A run that stopped then would have nothing to go on from, or end with the error of that save."""
    (tmp_path / "regroup").touch()
    monkeypatch.setenv(REGROUP_VARIABLE, str(tmp_path / "regroup"))
    trainer = make_stub_trainer(3)
    saver = Checkpointer(None)
    saver.trainer, saver.is_held = trainer, is_held
    monkeypatch.setattr(saver, "save_step", raise_disk_full)
    trainer.stop, trainer.call = StopRequests(), lambda hook, *args: saver.on_save() if hook == "on_save" else None
    Trainer.end_step(trainer, None)
    assert trainer.stop_text == ""
    assert is_held or "the disk is full" in str(saver.status.failure)


def make_stub_trainer(step: int) -> Any:
    """Return what ``Trainer.end_step`` needs of a run that saves behind this step."""
    trainer: Any = SimpleNamespace(
        progress=TrainProgress(step=step),
        samples=SimpleNamespace(step=step),
        world=SimpleNamespace(any_rank=list, rank=1),
        due=lambda hook: [],
        phases=SimpleNamespace(step_done=bool),
        pause_s=0.0,
        stop_text="",
        has_steps_left=True,
        _is_save_requested=True,
        config=SimpleNamespace(checkpoint=CheckpointConfig()),
    )
    trainer.agree = lambda: Trainer.agree(trainer)
    return trainer


def raise_disk_full(**kwargs: Any) -> None:
    raise CheckpointError("the disk is full")


def test_partial_restore_flags_are_complete():
    disabled = {field.name: False for field in fields(CheckpointConfig) if field.type in (bool, "bool")}
    partial = {
        name
        for name in disabled
        if RestoreOptions.from_flags(replace(CheckpointConfig(), **(disabled | {name: True}))) != EVERYTHING
    }
    assert partial - {"eval_only"} == {
        flag[2:].replace("-", "_") for flag in PARTIAL_RESTORE_FLAGS
    }  # --eval-only makes no checkpoint


@pytest.mark.parametrize(
    ("signums", "exit_code", "reason"),
    [
        ([signal.SIGUSR1], 0, "received SIGUSR1"),
        ([signal.SIGUSR1, signal.SIGUSR1], 0, "received SIGUSR1"),
        ([signal.SIGUSR1, signal.SIGTERM], 143, None),
        ([signal.SIGTERM, signal.SIGTERM], 143, None),
        ([signal.SIGTERM, signal.SIGINT], 130, None),
        ([signal.SIGINT, signal.SIGTERM], 143, None),
        ([signal.SIGINT, signal.SIGINT, signal.SIGINT], 0, "received SIGINT"),
        ([signal.SIGINT, PAUSE, signal.SIGINT], 130, None),
    ],
)
def test_first_signal_requests_stop_and_second_exits(signums, exit_code, reason, monkeypatch):
    """A Ctrl-C that arrives more than once is one."""
    monkeypatch.setattr(exit_signals, "KEY_PRESS_S", 0.05 if PAUSE in signums else 60.0)
    codes, results, _ = fork_ranks(1, receive_signals, signums, init=False)
    assert (codes, results[0]) == ([exit_code], reason)


def receive_signals(rank: int, signums: list[int]) -> str | None:
    stop_requests = StopRequests()
    stop_requests.install_handlers()
    for signum in signums:
        if signum == PAUSE:
            time.sleep(0.1)
        else:
            signal.raise_signal(signum)
    return stop_requests.stop_reason(1)


@pytest.mark.parametrize(
    ("signum", "last_signum", "elapsed_s", "is_same_press"),
    [
        (signal.SIGINT, signal.SIGINT, 0.45, True),
        (signal.SIGINT, signal.SIGINT, 0.55, False),
        (signal.SIGHUP, signal.SIGHUP, 0.1, True),
        (signal.SIGTERM, signal.SIGTERM, 0.1, False),
        (signal.SIGTERM, signal.SIGINT, 0.1, False),
    ],
)
def test_repeated_terminal_signal_within_half_second_is_one_press(signum, last_signum, elapsed_s, is_same_press):
    assert exit_signals.is_repeated_key_press(signum, last_signum, elapsed_s) == is_same_press


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError("Unable to allocate 1.00 GiB for an array with shape (1,)"), "could not allocate 1.00 GiB, at"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes."), "12 bytes, at"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), "2.50 GiB, at"),
        (MemoryError(), "could not allocate memory"),
    ],
)
def test_allocation_failures_are_recognized(error, message):
    assert message in (exit_guard.out_of_memory_text(error) or "")


@pytest.mark.parametrize("error", [RuntimeError("a shape is wrong"), ValueError("out of memory"), KeyError("memory")])
def test_other_errors_are_not_out_of_memory(error):
    assert exit_guard.out_of_memory_text(error) is None


@pytest.mark.parametrize(
    ("module", "function_name"),
    [(data, "open_data"), (Checkpointer, "on_save"), (Evaluator, "evaluate")],
    ids=["start", "save", "eval"],
)
def test_second_signal_exits_immediately_in_any_phase(module, function_name, corpus, tmp_path):
    """Row A11: into the start-up, a save or an evaluation; checkpoints that are there stay whole."""

    def inject_fault(rank: int) -> None:
        def raise_two_signals(*args: object, **kwargs: object) -> None:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)

        setattr(module, function_name, raise_two_signals)

    argv = make_flags(corpus, tmp_path / "run", "--eval-interval 1 --save-interval 1")
    assert launch_script(1, argv, tmp_path / "log", inject_fault) == [130]


def test_kill_switch_file_stops_run(tmp_path: Path) -> None:
    stop_requests, switch_path = StopRequests(), tmp_path / "stop"
    stop_requests.set_limits(0, 0.0, 0.0, str(switch_path))
    assert stop_requests.stop_reason(3) is None
    switch_path.touch()
    assert stop_requests.stop_reason(4) == f"--kill-switch-path {switch_path} exists"
    with pytest.raises(ConfigError, match=f"must name a file that does not exist yet, got {switch_path}"):
        parse(["--kill-switch-path", str(switch_path)], world_size=1, env={})
    assert parse(["--kill-switch-path", str(switch_path), "--dry-run"], world_size=1, env={}).run.kill_switch_path

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
from megatron.runtime.exit_signals import LOSING, REGROUP, REGROUP_VARIABLE, StopRequests, how_to_go_on
from megatron.training import data
from megatron.training.callbacks.checkpointer import Checkpointer
from megatron.training.callbacks.evaluator import Evaluator
from megatron.training.restore_options import EVERYTHING, RestoreOptions
from megatron.training.train_progress import TrainProgress
from megatron.training.trainer import Trainer
from tests.helpers.harness import fork_ranks
from tests.helpers.runs import flags, start_script

RUN = Path("runs/gpt2-1")
SCRIPT = {"MEGATRON_VARIABLES": "--save=CHECKPOINT_PATH"}
JOB = {"SLURM_JOB_ID": "77"}
LATER = 0


@pytest.mark.parametrize(
    ("command", "env", "message"),
    [
        ("", {}, "Resume with the same command and --load runs/gpt2-1"),
        ("--save runs/gpt2-1 --train-iters 9", {}, "Resume with the same command and --load runs/gpt2-1"),
        ("", SCRIPT, "Resume with the same command of the run script and --load runs/gpt2-1"),
        ("--resume", SCRIPT, "the same command of the run script and --load runs/gpt2-1 in place of --resume"),
        ("--load old --finetune", {}, "--load runs/gpt2-1 in place of --load and --finetune"),
        ("--save=runs/gpt2-1 --resume", {}, "Resume with the same command as before"),
        ("--load runs/gpt2-1", {}, "Resume with the same command as before"),
        ("--save runs/../runs/gpt2-1/ --resume", {}, "Resume with the same command as before"),
        ("--load old --no-load-optim", {}, "--load runs/gpt2-1 in place of --load and --no-load-optim"),
        ("--load ./runs/gpt2-1 --no-load-rng", {}, "Resume with the same command without --no-load-rng"),
        ("--save runs/gpt2-1 --resume --load-weights-only", JOB, "the same command without --load-weights-only; with"),
        ("--load runs/gpt2-1 --finetune", {}, "Resume with the same command without --finetune"),
        ("", JOB, "with --save runs/gpt2-1 --resume --load-if-exists a requeued job resumes by itself"),
        ("--save runs/gpt2-1 --resume --load-if-exists", JOB, "the same command as before, or `scontrol requeue 77`"),
    ],
)
def test_the_line_says_how_this_very_command_goes_on(command, env, message):
    assert message in how_to_go_on(RUN, command.split(), env)


def test_defaults_of_a_run_script_count_and_odd_names_are_quoted():
    env = {"MEGATRON_DEFAULTS": "--load 'my run'"}
    assert how_to_go_on(Path("my run"), [], env) == "Resume with the same command as before"
    assert "--load 'my run'" in how_to_go_on(Path("my run"), [], {})


def test_a_node_that_waits_is_taken_in_with_a_save_and_not_ahead_of_it(tmp_path, monkeypatch):
    place = tmp_path / "regroup"
    monkeypatch.setenv(REGROUP_VARIABLE, str(place))
    stop = StopRequests()
    trainer: Any = SimpleNamespace(stop=stop, progress=TrainProgress(step=3), world=SimpleNamespace(any=list))

    def agreed(saves: bool) -> tuple[str, bool]:
        trainer._save_is_wanted = saves
        return Trainer.agree(trainer)

    assert agreed(True) == ("", True)
    place.touch()
    assert agreed(False) == ("", False)
    assert agreed(True) == (REGROUP, True)
    stop.request("another reason")
    assert agreed(True) == ("another reason", True)


def test_a_node_that_comes_in_the_midst_of_a_save_waits_for_the_next_one(tmp_path, monkeypatch):
    place, steps = tmp_path / "regroup", [step_of_a_run(3), step_of_a_run(4)]
    monkeypatch.setenv(REGROUP_VARIABLE, str(place))
    for step in steps:
        step.stop = StopRequests()
        step.call = lambda hook: place.touch()
        Trainer.end_step(step, None)
    assert [step.stop_text for step in steps] == ["", REGROUP]


@pytest.mark.parametrize("is_held", [False, True], ids=["that fails", "that bad steps forbid"])
def test_a_save_takes_no_node_in(is_held, tmp_path, monkeypatch):
    """A run that stopped then would have nothing to go on from, or end with the error of that save."""
    (tmp_path / "regroup").touch()
    monkeypatch.setenv(REGROUP_VARIABLE, str(tmp_path / "regroup"))
    trainer = step_of_a_run(3)
    saver = Checkpointer(None)
    saver.trainer, saver.is_held = trainer, is_held
    monkeypatch.setattr(saver, "save_step", raise_full)
    trainer.stop, trainer.call = StopRequests(), lambda hook, *given: saver.on_save() if hook == "on_save" else None
    Trainer.end_step(trainer, None)
    assert trainer.stop_text == ""
    assert is_held or "the disk is full" in str(saver.status.failure)


def step_of_a_run(step: int) -> Any:
    """Return what ``Trainer.end_step`` needs of a run that saves behind this step."""
    trainer: Any = SimpleNamespace(
        progress=TrainProgress(step=step), samples=SimpleNamespace(step=step), world=SimpleNamespace(any=list, rank=1),
        due=lambda hook: [], phases=SimpleNamespace(step_done=bool), pause_s=0.0, stop_text="", has_steps_left=True,
        _save_is_wanted=True, config=SimpleNamespace(checkpoint=CheckpointConfig()),
    )  # fmt: skip
    trainer.agree = lambda: Trainer.agree(trainer)
    return trainer


def raise_full(**given: Any) -> None:
    raise CheckpointError("the disk is full")


def test_the_flags_that_are_advised_against_are_all_that_leave_something_out():
    off = {field.name: False for field in fields(CheckpointConfig) if field.type in (bool, "bool")}
    losing = {
        name for name in off if RestoreOptions.of(replace(CheckpointConfig(), **(off | {name: True}))) != EVERYTHING
    }
    assert losing - {"eval_only"} == {flag[2:].replace("-", "_") for flag in LOSING}  # --eval-only makes no checkpoint


@pytest.mark.parametrize(
    ("numbers", "code", "reason"),
    [
        ([signal.SIGUSR1], 0, "received SIGUSR1"),
        ([signal.SIGUSR1, signal.SIGUSR1], 0, "received SIGUSR1"),
        ([signal.SIGUSR1, signal.SIGTERM], 143, None),
        ([signal.SIGTERM, signal.SIGTERM], 143, None),
        ([signal.SIGTERM, signal.SIGINT], 130, None),
        ([signal.SIGINT, signal.SIGTERM], 143, None),
        ([signal.SIGINT, signal.SIGINT, signal.SIGINT], 0, "received SIGINT"),
        ([signal.SIGINT, LATER, signal.SIGINT], 130, None),
    ],
)
def test_a_first_signal_is_a_request_and_a_second_ends_the_process(numbers, code, reason, monkeypatch):
    """A Ctrl-C that arrives more than once is one."""
    monkeypatch.setattr(exit_signals, "PRESS_S", 0.05 if LATER in numbers else 60.0)
    codes, results, _ = fork_ranks(1, hear, numbers, init=False)
    assert (codes, results[0]) == ([code], reason)


def hear(rank: int, numbers: list[int]) -> str | None:
    stop = StopRequests()
    stop.listen()
    for number in numbers:
        if number == LATER:
            time.sleep(0.1)
        else:
            signal.raise_signal(number)
    return stop.reason(1)


@pytest.mark.parametrize(
    ("number", "last", "since_s", "is_one"),
    [
        (signal.SIGINT, signal.SIGINT, 0.45, True),
        (signal.SIGINT, signal.SIGINT, 0.55, False),
        (signal.SIGHUP, signal.SIGHUP, 0.1, True),
        (signal.SIGTERM, signal.SIGTERM, 0.1, False),
        (signal.SIGTERM, signal.SIGINT, 0.1, False),
    ],
)
def test_what_a_terminal_sends_twice_within_half_a_second_is_one_press(number, last, since_s, is_one):
    assert exit_signals.is_same_press(number, last, since_s) == is_one


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError("Unable to allocate 1.00 GiB for an array with shape (1,)"), "could not allocate 1.00 GiB, at"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes."), "12 bytes, at"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), "2.50 GiB, at"),
        (MemoryError(), "could not allocate memory"),
    ],
)
def test_a_failed_allocation_is_known_by_its_kinds(error, message):
    assert message in (exit_guard.out_of_memory(error) or "")


@pytest.mark.parametrize("error", [RuntimeError("a shape is wrong"), ValueError("out of memory"), KeyError("memory")])
def test_another_error_is_not_one_of_memory(error):
    assert exit_guard.out_of_memory(error) is None


@pytest.mark.parametrize(
    ("module", "name"),
    [(data, "open_data"), (Checkpointer, "on_save"), (Evaluator, "evaluate")],
    ids=["start", "save", "eval"],
)
def test_a_second_signal_leaves_at_once_wherever_the_first_fell(module, name, corpus, tmp_path):
    """Row A11: into the start-up, a save or an evaluation; checkpoints that are there stay whole."""

    def plant(rank: int) -> None:
        def twice(*args: object, **kwargs: object) -> None:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)

        setattr(module, name, twice)

    argv = flags(corpus, tmp_path / "run", "--eval-interval 1 --save-interval 1")
    assert start_script(1, argv, tmp_path / "log", plant) == [130]


def test_a_run_stops_behind_the_step_at_whose_end_its_kill_switch_is_there(tmp_path: Path) -> None:
    stop, switch = StopRequests(), tmp_path / "stop"
    stop.limit(0, 0.0, 0.0, str(switch))
    assert stop.reason(3) is None
    switch.touch()
    assert stop.reason(4) == f"--kill-switch-path {switch} exists"
    with pytest.raises(ConfigError, match=f"must name a file that does not exist yet, got {switch}"):
        parse(["--kill-switch-path", str(switch)], world_size=1, env={})
    assert parse(["--kill-switch-path", str(switch), "--dry-run"], world_size=1, env={}).run.kill_switch_path

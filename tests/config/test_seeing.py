"""Flags of metrics and profile: what they read, and what is refused."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from megatron.config import Config, parse
from megatron.errors import ConfigError

BASE = "--data-path none --num-layers 2 --hidden-size 32 --num-attention-heads 4 --train-iters 9 --dry-run"


def read(extra: str) -> Config:
    return parse(f"{BASE} {extra}".split(), world_size=1)


@pytest.mark.parametrize("text, steps", [("5-7", [5, 6, 7]), ("9", [9]), ("1-1", [1])])
def test_profiled_steps_are_counted_from_1_with_the_last(text: str, steps: list[int]) -> None:
    assert list(read(f"--profile {text}").seeing.profiled()) == steps
    assert not read("").seeing.profiled()


def test_names_of_megatron_set_the_run_of_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    for name in ("--wandb-name", "--wandb-exp-name"):
        seeing = read(f"--wandb-project p {name} n --wandb-save-dir d --wandb-entity e").seeing
        assert (seeing.wandb_project, seeing.wandb_exp_name) == ("p", "n")
        assert (seeing.wandb_save_dir, seeing.wandb_entity) == ("d", "e")


@pytest.mark.parametrize(
    "extra, message",
    [
        ("--profile 0-2", "--profile must be a step or a range of steps, counted from 1, such as 5-7; got '0-2'"),
        ("--profile 3-1", "--profile must be a step or a range of steps"),
        ("--profile 1,2", "--profile must be a step or a range of steps"),
        ("--profile 8-10", "--profile must name steps of the run, got 8-10 and --train-iters 9"),
        ("--profile 1 --eval-only --load x", "--profile applies to training only, got --eval-only"),
        ("--log-layer-norms --eval-only --load x", "--log-layer-norms applies to training only, got --eval-only"),
        ("--profile 5-7 --profile-step-start 3", "--profile-step-start must agree with --profile, got the steps 4-12"),
        ("--wandb-exp-name n", "--wandb-exp-name has no effect without --wandb-project"),
        (
            "--wandb-save-dir d --wandb-entity e",
            "--wandb-save-dir, --wandb-entity has no effect without --wandb-project",
        ),
    ],
)
def test_what_cannot_act_is_refused(extra: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(extra)


def test_wandb_that_is_not_installed_is_told_with_all_other_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = (
        r"(?s)--wandb-project needs the package wandb.* pip install -e '\.\[wandb\]' or pip install wandb.*--profile"
    )
    with pytest.raises(ConfigError, match=message):
        read("--wandb-project p --profile 99")
    monkeypatch.setenv("RANK", "1")  # which does not import it
    assert read("--wandb-project p").seeing.wandb_project == "p"

"""Flags of metrics and profile: what they read, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron.config import Config, parse
from megatron.errors import ConfigError

BASE_FLAGS = "--data-path none --num-layers 2 --hidden-size 32 --num-attention-heads 4 --train-iters 9 --dry-run"


def parse_line(extra: str) -> Config:
    return parse(f"{BASE_FLAGS} {extra}".split(), world_size=1)


@pytest.mark.parametrize("text, steps", [("5-7", [5, 6, 7]), ("9", [9]), ("1-1", [1])])
def test_profile_steps_are_one_based_and_inclusive(text: str, steps: list[int]) -> None:
    assert list(parse_line(f"--profile {text}").logging.profiled_steps()) == steps
    assert not parse_line("").logging.profiled_steps()


def test_megatron_names_set_wandb_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    for name in ("--wandb-name", "--wandb-exp-name"):
        logging_config = parse_line(f"--wandb-project p {name} n --wandb-save-dir d --wandb-entity e").logging
        assert (logging_config.wandb_project, logging_config.wandb_exp_name) == ("p", "n")
        assert (logging_config.wandb_save_dir, logging_config.wandb_entity) == ("d", "e")


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
def test_invalid_or_ineffective_flags_raise(extra: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_line(extra)


def test_missing_wandb_is_reported_with_other_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = (
        r"(?s)--wandb-project needs the package wandb.* pip install -e '\.\[wandb\]' or pip install wandb.*--profile"
    )
    with pytest.raises(ConfigError, match=message):
        parse_line("--wandb-project p --profile 99")
    monkeypatch.setenv("RANK", "1")  # which does not import it
    assert parse_line("--wandb-project p").logging.wandb_project == "p"


def test_config_has_former_names_of_sections() -> None:
    config = parse_line("--profile 5-7")
    with pytest.warns(DeprecationWarning, match="Config.seeing is now logging") as record:
        former = config.seeing, config.own, config.given
    assert former == (config.logging, config.family_config, config.explicit_fields)
    assert record[0].filename == __file__


def test_run_config_with_former_section_name_loads(tmp_path: Path) -> None:
    saved = parse_line("--profile 5-7").to_dict()
    saved["seeing"] = saved.pop("logging")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(saved), encoding="utf-8")
    config = parse(["--config", str(file)], world_size=1)
    assert config.logging.profile == "5-7"

"""The optimizer section of a DeepSpeed JSON has DeepSpeed's defaults, parameter by parameter."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime import lr_schedules

from megatron.arguments import parse
from megatron.arguments.deepspeed_keys import OPTIMIZER_PARAMS, OPTIMIZER_TYPES, OTHER_PARAMS
from megatron.arguments.other_programs import GPT
from megatron.checkpoint.checkpoint_args import bring
from megatron.config import Config
from megatron.errors import ConfigError
from tests.helpers.huggingface_models import config_of, save_model

BUILT = {
    ("Adam", False): (FusedAdam, DeepSpeedCPUAdam),
    ("AdamW", False): (FusedAdam, DeepSpeedCPUAdam),
    ("AdamW", True): (torch.optim.AdamW,),
    ("Adam", True): (torch.optim.AdamW, torch.optim.Adam),
    ("SGD", False): (torch.optim.SGD,),
}
"""(type, torch_adam) -> the classes of which DeepSpeed's ``get_optimizer_configuration`` builds one."""
NEVER_HERE = {
    ("Adam", True): {torch.optim.Adam},  # adam_w_mode false, which is rejected
}


def parsed(section: Any, folder: Path, line: str = "", **options: Any) -> Config:
    path = folder / "ds.json"
    path.write_text(json.dumps({"optimizer": section}))
    return parse([*line.split(), "--deepspeed_config", str(path)], world_size=1, env={}, **options)


def parameters(built: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(built.__init__).parameters.values():  # type: ignore[misc]
        if parameter.name not in ("self", "params", "model_params"):
            yield parameter


def value_of(config: Config, name: str) -> Any:
    settings = config.optimizer
    if name == "betas":
        return (settings.adam_beta1, settings.adam_beta2)
    return getattr(settings, OPTIMIZER_PARAMS[name].field)


@pytest.mark.parametrize(("kind", "is_torch"), BUILT)
def test_every_parameter_that_is_omitted_has_the_default_of_the_class_that_deepspeed_builds(
    kind: str, is_torch: bool, tmp_path: Path
) -> None:
    config = parsed({"type": kind, "params": {"torch_adam": True} if is_torch else {}}, tmp_path)
    walked = set()
    for built in BUILT[kind, is_torch]:
        for parameter in parameters(built):
            name, key = parameter.name, OPTIMIZER_PARAMS[parameter.name]
            assert name not in OTHER_PARAMS[OPTIMIZER_TYPES[kind.lower()]], name
            walked.add(name)
            if built in NEVER_HERE.get((kind, is_torch), ()):
                continue
            if key.field or name == "betas":
                assert value_of(config, name) == parameter.default, name
            elif key.holds and not (name == "fp32_optimizer_states" or name == "adam_w_mode"):
                assert parameter.default in key.holds, name
    assert {"lr", "weight_decay"} <= walked


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "adam"])
def test_every_parameter_of_another_type_is_rejected(kind: str, tmp_path: Path) -> None:
    samples = {"betas": [0.9, 0.9], "momentum": 0.5, "dampening": 0, "eps": 1e-8}
    for name in OTHER_PARAMS[OPTIMIZER_TYPES[kind.lower()]]:
        key = OPTIMIZER_PARAMS[name]
        value = samples.get(name, key.holds[0] if key.holds else True)
        with pytest.raises(ConfigError, match=f"optimizer.params.{name} is not a parameter of {kind} in DeepSpeed"):
            parsed({"type": kind, "params": {name: value}}, tmp_path)


def test_flags_keys_and_auto_come_before_deepspeeds_defaults(tmp_path: Path) -> None:
    def pair(params: dict[str, Any], line: str = "", **options: Any) -> tuple[float, float]:
        settings = parsed({"type": "AdamW", "params": params}, tmp_path, line, **options).optimizer
        return settings.lr, settings.weight_decay

    assert pair({}) == (1e-3, 0.0)
    assert pair({"lr": 2e-4}) == (2e-4, 0.0)
    assert pair({"lr": "auto", "weight_decay": "auto"}) == (5e-4, 0.01)
    assert pair({}, "--lr 3e-4 --weight-decay 0.1") == (3e-4, 0.1)
    assert pair({}, defaults={"weight_decay": 0.2}) == (1e-3, 0.2)
    assert pair({}, defaults=GPT) == (1e-3, 0.01), "Megatron's programs do not read the section"
    without_type = parsed({"params": {}}, tmp_path).optimizer
    assert (without_type.lr, without_type.weight_decay) == (5e-4, 0.01), "DeepSpeed builds nothing from it"
    notes = parsed({"type": "AdamW"}, tmp_path).notes
    assert [note for note in notes if "lr 0.001, weight_decay 0" in note]


def test_momentum_of_sgd_is_taken_and_nesterov_rejected(tmp_path: Path) -> None:
    config = parsed({"type": "SGD", "params": {"momentum": 0.8}}, tmp_path)
    assert (config.optimizer.optimizer, config.optimizer.sgd_momentum) == ("sgd", 0.8)
    for name, value in (("nesterov", True), ("dampening", 0.1), ("maximize", True)):
        with pytest.raises(ConfigError, match=f"optimizer.params.{name}"):
            parsed({"type": "SGD", "params": {name: value}}, tmp_path)


@pytest.mark.parametrize("value", [0, 1.0])
def test_max_grad_norm_is_rejected_with_its_alternative(value: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_grad_norm is not supported, as in DeepSpeed. Use gradient_clipping"):
        parsed({"type": "AdamW", "params": {"max_grad_norm": value}}, tmp_path)


@pytest.mark.parametrize("kind", lr_schedules.VALID_LR_SCHEDULES)
def test_no_parameter_of_a_scheduler_is_taken_silently(kind: str, tmp_path: Path) -> None:
    """A scheduler section is accepted only if every parameter is "auto", from the flags."""
    names = [each.name for each in parameters(getattr(lr_schedules, kind)) if each.name != "optimizer"]
    path = tmp_path / "ds.json"

    def read(params: dict[str, Any]) -> Config:
        path.write_text(json.dumps({"scheduler": {"type": kind, "params": params}}))
        return parse(["--deepspeed_config", str(path)], world_size=1, env={})

    assert read(dict.fromkeys(names, "auto")).optimizer.lr == 5e-4
    for params in ({}, *({**dict.fromkeys(names, "auto"), name: 1} for name in names)):
        with pytest.raises(ConfigError, match="key scheduler is not supported"):
            read(params)


@pytest.fixture
def run_of_8c23b9e6(tmp_path: Path) -> Path:
    """Return a run that has weight_decay 0.01 and lr 5e-4 where its JSON gives neither."""
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 512}
    save_model(tmp_path / "run", config_of("gpt2", **sizes))
    return tmp_path / "run"


def test_a_resumed_run_keeps_its_values_where_neither_flag_nor_key_gives_them(
    run_of_8c23b9e6: Path, tmp_path: Path
) -> None:
    def resumed(params: dict[str, Any], line: str = "") -> Config:
        args = partial(bring, name="x")
        section = {"type": "AdamW", "params": params}
        return parsed(section, tmp_path, f"--load {run_of_8c23b9e6} --dry-run {line}", checkpoint_args=args)

    kept = resumed({})
    assert (kept.optimizer.lr, kept.optimizer.weight_decay) == (5e-4, 0.01)
    (note,) = [note for note in kept.notes if "that this run keeps" in note]
    assert "lr 0.0005 (a new run: 0.001)" in note and "weight-decay 0.01 (a new run: 0.0)" in note
    stated = resumed({"weight_decay": 0.3}, "--lr 1e-4")
    assert (stated.optimizer.lr, stated.optimizer.weight_decay) == (1e-4, 0.3)
    anew = resumed({}, "--finetune")
    assert (anew.optimizer.lr, anew.optimizer.weight_decay) == (1e-3, 0.0)

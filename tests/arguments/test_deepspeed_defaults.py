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
from megatron.arguments.deepspeed_keys import OPTIMIZER_PARAMS, OPTIMIZER_TYPES, UNSUPPORTED_PARAMS
from megatron.arguments.other_programs import GPT
from megatron.checkpoint.checkpoint_args import load_checkpoint_args
from megatron.config import Config
from megatron.errors import ConfigError
from tests.helpers.huggingface_models import make_family_config, save_model

OPTIMIZER_CLASSES = {
    ("Adam", False): (FusedAdam, DeepSpeedCPUAdam),
    ("AdamW", False): (FusedAdam, DeepSpeedCPUAdam),
    ("AdamW", True): (torch.optim.AdamW,),
    ("Adam", True): (torch.optim.AdamW, torch.optim.Adam),
    ("SGD", False): (torch.optim.SGD,),
}
"""(type, torch_adam) -> the classes of which DeepSpeed's ``get_optimizer_configuration`` builds one."""
UNSUPPORTED_CLASSES = {
    ("Adam", True): {torch.optim.Adam},  # adam_w_mode false, which is rejected
}


def parse_section(section: Any, folder: Path, line: str = "", **options: Any) -> Config:
    path = folder / "ds.json"
    path.write_text(json.dumps({"optimizer": section}))
    return parse([*line.split(), "--deepspeed_config", str(path)], world_size=1, env={}, **options)


def iter_parameters(cls: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(cls.__init__).parameters.values():  # type: ignore[misc]
        if parameter.name not in ("self", "params", "model_params"):
            yield parameter


def get_value(config: Config, name: str) -> Any:
    settings = config.optimizer
    if name == "betas":
        return (settings.adam_beta1, settings.adam_beta2)
    return getattr(settings, OPTIMIZER_PARAMS[name].field)


@pytest.mark.parametrize(("optimizer_type", "is_torch"), OPTIMIZER_CLASSES)
def test_omitted_optimizer_params_have_deepspeed_defaults(optimizer_type: str, is_torch: bool, tmp_path: Path) -> None:
    config = parse_section({"type": optimizer_type, "params": {"torch_adam": True} if is_torch else {}}, tmp_path)
    checked = set()
    for optimizer_class in OPTIMIZER_CLASSES[optimizer_type, is_torch]:
        for parameter in iter_parameters(optimizer_class):
            name, key = parameter.name, OPTIMIZER_PARAMS[parameter.name]
            assert name not in UNSUPPORTED_PARAMS[OPTIMIZER_TYPES[optimizer_type.lower()]], name
            checked.add(name)
            if optimizer_class in UNSUPPORTED_CLASSES.get((optimizer_type, is_torch), ()):
                continue
            if key.field or name == "betas":
                assert get_value(config, name) == parameter.default, name
            elif key.accepted_values and not (name == "fp32_optimizer_states" or name == "adam_w_mode"):
                assert parameter.default in key.accepted_values, name
    assert {"lr", "weight_decay"} <= checked


@pytest.mark.parametrize("optimizer_type", ["Adam", "AdamW", "SGD", "adam"])
def test_params_of_other_optimizer_types_raise(optimizer_type: str, tmp_path: Path) -> None:
    samples = {"betas": [0.9, 0.9], "momentum": 0.5, "dampening": 0, "eps": 1e-8}
    for name in UNSUPPORTED_PARAMS[OPTIMIZER_TYPES[optimizer_type.lower()]]:
        key = OPTIMIZER_PARAMS[name]
        value = samples.get(name, key.accepted_values[0] if key.accepted_values else True)
        with pytest.raises(
            ConfigError, match=f"optimizer.params.{name} is not a parameter of {optimizer_type} in DeepSpeed"
        ):
            parse_section({"type": optimizer_type, "params": {name: value}}, tmp_path)


def test_flags_keys_and_auto_override_deepspeed_defaults(tmp_path: Path) -> None:
    def lr_and_weight_decay(params: dict[str, Any], line: str = "", **options: Any) -> tuple[float, float]:
        settings = parse_section({"type": "AdamW", "params": params}, tmp_path, line, **options).optimizer
        return settings.lr, settings.weight_decay

    assert lr_and_weight_decay({}) == (1e-3, 0.0)
    assert lr_and_weight_decay({"lr": 2e-4}) == (2e-4, 0.0)
    assert lr_and_weight_decay({"lr": "auto", "weight_decay": "auto"}) == (5e-4, 0.01)
    assert lr_and_weight_decay({}, "--lr 3e-4 --weight-decay 0.1") == (3e-4, 0.1)
    assert lr_and_weight_decay({}, defaults={"weight_decay": 0.2}) == (1e-3, 0.2)
    assert lr_and_weight_decay({}, defaults=GPT) == (1e-3, 0.01), "Megatron's programs do not read the section"
    without_type = parse_section({"params": {}}, tmp_path).optimizer
    assert (without_type.lr, without_type.weight_decay) == (5e-4, 0.01), "DeepSpeed builds nothing from it"
    notes = parse_section({"type": "AdamW"}, tmp_path).notes
    assert [note for note in notes if "lr 0.001, weight_decay 0" in note]


def test_sgd_momentum_is_used_and_nesterov_raises(tmp_path: Path) -> None:
    config = parse_section({"type": "SGD", "params": {"momentum": 0.8}}, tmp_path)
    assert (config.optimizer.optimizer, config.optimizer.sgd_momentum) == ("sgd", 0.8)
    for name, value in (("nesterov", True), ("dampening", 0.1), ("maximize", True)):
        with pytest.raises(ConfigError, match=f"optimizer.params.{name}"):
            parse_section({"type": "SGD", "params": {name: value}}, tmp_path)


@pytest.mark.parametrize("value", [0, 1.0])
def test_max_grad_norm_error_names_gradient_clipping(value: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_grad_norm is not supported, as in DeepSpeed. Use gradient_clipping"):
        parse_section({"type": "AdamW", "params": {"max_grad_norm": value}}, tmp_path)


@pytest.mark.parametrize("scheduler_type", lr_schedules.VALID_LR_SCHEDULES)
def test_scheduler_params_other_than_auto_raise(scheduler_type: str, tmp_path: Path) -> None:
    """A scheduler section is accepted only if every parameter is "auto", from the flags."""
    names = [
        parameter.name
        for parameter in iter_parameters(getattr(lr_schedules, scheduler_type))
        if parameter.name != "optimizer"
    ]
    path = tmp_path / "ds.json"

    def parse_scheduler(params: dict[str, Any]) -> Config:
        path.write_text(json.dumps({"scheduler": {"type": scheduler_type, "params": params}}))
        return parse(["--deepspeed_config", str(path)], world_size=1, env={})

    assert parse_scheduler(dict.fromkeys(names, "auto")).optimizer.lr == 5e-4
    for params in ({}, *({**dict.fromkeys(names, "auto"), name: 1} for name in names)):
        with pytest.raises(ConfigError, match="key scheduler is not supported"):
            parse_scheduler(params)


@pytest.fixture
def legacy_run(tmp_path: Path) -> Path:
    """Return a run that has weight_decay 0.01 and lr 5e-4 where its JSON gives neither."""
    model_sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 512}
    save_model(tmp_path / "run", make_family_config("gpt2", **model_sizes))
    return tmp_path / "run"


def test_resumed_run_retains_saved_optimizer_values(legacy_run: Path, tmp_path: Path) -> None:
    def parse_resumed(params: dict[str, Any], line: str = "") -> Config:
        load_args = partial(load_checkpoint_args, name="x")
        section = {"type": "AdamW", "params": params}
        return parse_section(section, tmp_path, f"--load {legacy_run} --dry-run {line}", checkpoint_args=load_args)

    retained = parse_resumed({})
    assert (retained.optimizer.lr, retained.optimizer.weight_decay) == (5e-4, 0.01)
    (note,) = [note for note in retained.notes if "that this run keeps" in note]
    assert "lr 0.0005 (a new run: 0.001)" in note and "weight-decay 0.01 (a new run: 0.0)" in note
    overridden = parse_resumed({"weight_decay": 0.3}, "--lr 1e-4")
    assert (overridden.optimizer.lr, overridden.optimizer.weight_decay) == (1e-4, 0.3)
    finetuned = parse_resumed({}, "--finetune")
    assert (finetuned.optimizer.lr, finetuned.optimizer.weight_decay) == (1e-3, 0.0)

"""``import tds as deepspeed`` leaves the rest of a program as it was."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import tds
import tds.pipe
from tds.deepspeed.alias import check_torch, check_versions
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, check_equal, make_engine, train_batch

initialize_module: Any = importlib.import_module("tds.deepspeed.initialize")
TDS_NAMES = {"PipelineEngine", "PipelineModule", "initialize", "pipe", "runtime"}
"""And names that DeepSpeed does not have."""


def test_public_names_are_deepspeed_objects_except_tds_names() -> None:
    for name in dir(deepspeed):
        if not name.startswith("_"):
            assert (getattr(tds, name) is getattr(deepspeed, name)) == (name not in TDS_NAMES), name


def test_names_are_resolved_on_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "made_up", 3, raising=False)
    assert tds.made_up == 3
    with pytest.raises(AttributeError):
        _ = tds.no_such_name
    assert tds.pipe.TiedLayerSpec is deepspeed.pipe.TiedLayerSpec
    assert tds.pipe.PipelineModule is tds.PipelineModule
    assert tds.pipe.DualPipeVModule is deepspeed.pipe.DualPipeVModule


def test_initialize_matches_deepspeed_signature() -> None:
    our_parameters = inspect.signature(tds.initialize, follow_wrapped=False).parameters
    deepspeed_parameters = inspect.signature(deepspeed.initialize).parameters
    assert list(our_parameters) == list(deepspeed_parameters)
    assert [p.default for p in our_parameters.values()] == [p.default for p in deepspeed_parameters.values()]


@pytest.mark.parametrize("version", ["0.19.5", "0.20.0", "1.0", "0.18.9+cpu"])
def test_unsupported_deepspeed_versions_are_rejected(version: str) -> None:
    with pytest.raises(ImportError, match=f"got {version}".replace("+", r"\+")):
        check_versions(version)


@pytest.mark.parametrize("version", ["0.19.6", "0.19.8", "0.19.12+cu12"])
def test_supported_deepspeed_versions_are_accepted(version: str) -> None:
    check_versions(version)


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cu117", "2.9"])
def test_older_torch_is_rejected(version: str) -> None:
    with pytest.raises(ImportError, match=f"requires torch >=2.11, got {version}".replace("+", r"\+")):
        check_torch(version)


def test_newer_torch_is_accepted_and_matches_project_requirement() -> None:
    for version in ("2.11.0+cu130", "2.13.0", "2.13.0a0+git1", "2.14.1+cpu", "3.0"):
        check_torch(version)
    project = tomllib.loads((Path(tds.__file__).parent / "pyproject.toml").read_text())["project"]
    assert {"torch>=2.13", "deepspeed>=0.19.6,<0.20"} <= set(project["dependencies"])


def _initialize_plain_model(rank: int) -> Any:
    tds.init_distributed("gloo", verbose=False)
    model = torch.nn.Linear(3, 3)
    config = {"train_micro_batch_size_per_gpu": 1}
    engine, *_ = tds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
    return type(engine) is deepspeed.DeepSpeedEngine, deepspeed.PipelineEngine is not tds.PipelineEngine


def test_plain_model_gets_deepspeed_engine() -> None:
    assert run_ranks(1, _initialize_plain_model) == [(True, True)]


def _capture_output(rank: int, folder: str) -> None:
    with open(f"{folder}/{rank}", "w") as file, redirect_stdout(file), redirect_stderr(file):
        make_engine(Toy("chain"), 2)


def test_deepspeed_is_quiet_by_default(tmp_path: Path) -> None:
    run_ranks(2, _capture_output, str(tmp_path))
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["", ""]


def _stock_module(toy: Toy) -> Any:
    tds.init_distributed("gloo", verbose=False)
    return deepspeed.PipelineModule(toy.layer_specs(), num_stages=2, loss_fn=toy.loss_fn, partition_method="uniform")


def _train_stock_module(rank: int, toys: list[Toy]) -> Any:
    results = [train_batch(make_engine(toy, 2, module=_stock_module(toy)), toy) for toy in toys]
    messages = []
    for pipeline in ({"schedule": "interleaved"}, {"chunks": 2}):
        with pytest.raises(ValueError) as raised:
            make_engine(Toy(pipeline=pipeline), 2, module=_stock_module(Toy()))
        messages.append(str(raised.value))
    return results, messages


def test_stock_module_supports_all_schedules_without_chunks() -> None:
    toys = [Toy("tied", pipeline={"schedule": name}) for name in ("1f1b", "gpipe", "zb-h1")]
    ranks = run_ranks(2, _train_stock_module, toys)
    for index, toy in enumerate(toys):
        check_equal([results[index] for results, _ in ranks], toy, tolerance=1e-13)
    assert all("tds.PipelineModule" in message for _, messages in ranks for message in messages)


def _enable_unsupported_sections(rank: int, folder: str) -> list[str]:
    """Return what is said of sections that are enabled, and of those that are not."""
    messages = []
    for key in ("amp", "progressive_layer_drop", "eigenvalue"):
        with pytest.raises(NotImplementedError) as raised:
            make_engine(Toy(config={key: {"enabled": True}}), 1)
        messages.append(str(raised.value))
    nested = {"weight_quantization": {"shared_parameters": {"enabled": True}, "different_groups": {}}}
    with pytest.raises(NotImplementedError) as raised:
        make_engine(Toy(config={"compression_training": nested}), 1)
    messages.append(str(raised.value))
    disabled = {
        "amp": {"enabled": False, "opt_level": "O1"},
        "eigenvalue": {"enabled": False},
        "progressive_layer_drop": {},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
    }
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4, **disabled}
    (Path(folder) / "ds.json").write_text(json.dumps(config))
    lines: list[str] = []
    with _capture_log(lines):
        for user_config in (config, f"{folder}/ds.json"):
            module = tds.PipelineModule(Toy().layer_specs(), num_stages=1, loss_fn=Toy().loss_fn)
            engine = tds.initialize(
                model=module, optimizer=torch.optim.SGD(module.parameters(), 0.1), config=user_config
            )[0]
            engine.train_batch(iter(Toy().make_batches()))
        messages.append("; ".join(lines))
        engine = make_engine(Toy(config={"flops_profiler": {"enabled": True, "profile_step": 0}}), 1)
        engine.train_batch(iter(Toy().make_batches()))
        assert not any(hasattr(layer, "__flops__") for layer in engine.module.modules()), "the profiler has begun"
        messages.append("; ".join(lines))
    assert set(config) > set(disabled), "the program's own JSON stays as it was"
    return messages


@contextmanager
def _capture_log(lines: list[str]) -> Iterator[None]:
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tds").addHandler(handler)
    yield
    logging.getLogger("tds").removeHandler(handler)


def test_unsupported_json_sections_are_rejected_or_announced(tmp_path: Path) -> None:
    (messages,) = run_ranks(1, _enable_unsupported_sections, str(tmp_path))
    for key, message in zip(
        ("amp", "progressive_layer_drop", "eigenvalue", "compression_training"), messages, strict=False
    ):
        assert f'does not support "{key}", which the JSON enables. Remove the section' in message
    assert messages[4] == ""
    assert messages[5].startswith('"flops_profiler" in the JSON has no effect in tds')


def _initialize_stock_engine(rank: int) -> str:
    initialize_module._use_tds_engine = nullcontext
    with pytest.raises(RuntimeError) as raised:
        make_engine(Toy(), 1)
    return str(raised.value)


def test_stock_engine_is_rejected() -> None:
    (message,) = run_ranks(1, _initialize_stock_engine)
    assert (
        "must build tds.PipelineEngine for a pipeline model, got deepspeed.runtime.pipe.engine.PipelineEngine"
        in message
    )

"""The registry of devices: who is there, what --device says to others, and whom "auto" takes."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron import accelerators, device
from megatron.accelerators import Accelerator
from megatron.config import parse
from megatron.errors import ConfigError
from megatron.training import device_setup
from tools import check_accelerator

MakeDevice = Callable[..., Accelerator]


@pytest.fixture
def make_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDevice]:
    """Return a function that registers a device; all are forgotten at the end."""
    monkeypatch.setattr(accelerators, "_registered", {})
    monkeypatch.setattr(accelerators, "_applied", {})
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def register(name: str = "npu", is_available: bool = True, **fields: Any) -> Accelerator:
        accelerator = Accelerator(name=name, is_available=lambda: is_available, **fields)
        accelerators.register(accelerator)
        return accelerator

    yield register


def test_auto_selects_last_registered_available_device(
    make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device.choose() == "cpu"
    make_device("npu"), make_device("tpu"), make_device("far", is_available=False)
    assert accelerators.names() == ("cpu", "cuda", "npu", "tpu", "far")
    assert device.choose() == "tpu"
    assert device.choose("npu") == "npu" and device.choose("cpu") == "cpu"
    monkeypatch.setenv("DS_ACCELERATOR", "npu")
    assert device.choose() == "npu"
    with pytest.raises(ValueError, match="--device far needs a FAR device, found none. Use --device cpu, or check"):
        device.choose("far")


def test_unknown_device_error_names_plug_in_import(make_device: MakeDevice) -> None:
    make_device("npu")
    with pytest.raises(ConfigError) as error:
        parse(["--device", "tpu"], world_size=1, env={})
    message = "--device must be auto, cpu, cuda or npu, got tpu. Load the plug-in of another accelerator by "
    assert message + '"import megatron_accelerator_tpu" in the script, or MEGATRON_ACCELERATOR=' in str(error.value)


def test_environment_plug_ins_are_imported_before_device_check(
    make_device: MakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_line = "from megatron.accelerators import Accelerator, register\n"
    (tmp_path / "plugged_in_here.py").write_text(
        import_line + "register(Accelerator(name='plugged', is_available=lambda: True))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    argv = ["--device", "plugged", "--dry-run"]
    config = parse(argv, world_size=1, env={"MEGATRON_ACCELERATOR": "plugged_in_here"})
    assert config.parallel.device == "plugged"
    with pytest.raises(ConfigError, match="MEGATRON_ACCELERATOR must name importable modules, got 'nowhere'"):
        parse(argv, world_size=1, env={"MEGATRON_ACCELERATOR": "nowhere"})


def test_hooks_override_device_functions_of_their_device_only(make_device: MakeDevice) -> None:
    hooks = {
        "name": lambda device_type: f"one {device_type}",
        "is_busy": lambda torch_device: True,
        "can_pin": lambda device_type: False,
    }
    make_device("xpu", hooks=hooks, backend="xccl", dtypes=("fp16", "fp32"))
    assert device.name("xpu") == "one xpu" and device.name("cpu").startswith("CPU, ")
    assert device.is_busy(torch.device("xpu", 1)) and not device.is_busy(torch.device("cpu"))
    assert not device.can_pin("xpu") and device.can_pin("cuda")
    assert (device.backend("xpu"), device.default_precision("xpu")) == ("xccl", "fp16")
    assert device.missing_dtype("xpu", "bf16") == "--device xpu supports fp16, fp32, got --bf16. Use --fp16"
    assert device.missing_dtype("xpu", "fp32") is device.missing_dtype("xpu", None) is None
    assert device.missing_dtype("cuda", "fp64") is None


def test_deepspeed_variable_is_set_before_adaptors_run(
    make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(accelerators, "adapt", lambda name: calls.append((name, os.environ.get("DS_ACCELERATOR"))))
    monkeypatch.setitem(os.environ, "DS_ACCELERATOR", "")
    make_device("npu")
    device_setup.configure_device(parse(["--device", "npu", "--dry-run"], world_size=1, env={}))
    assert calls == [("npu", "npu")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "cuda"}, "must be an unused identifier, got 'cuda'"),
        ({"name": "my device"}, "must be an unused identifier, got 'my device'"),
        (
            {"hooks": {"synchronise": print}},
            "functions of megatron.device, got synchronise. Use backend,",
        ),
        ({"dtypes": ("int8",)}, "the dtypes of device npu must be some of bf16, fp16, fp32, fp64"),
        ({"dtypes": ()}, "the dtypes of device npu must be some of"),
    ],
    ids=["taken", "spaced", "hook", "dtype", "no-dtype"],
)
def test_register_rejects_invalid_device(make_device: MakeDevice, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_device(**fields)


def test_register_rejects_duplicate_device_name(make_device: MakeDevice) -> None:
    accelerators.register(make_device("npu", module="first"))  # the same one again is no harm
    with pytest.raises(ValueError, match="must be registered only once, got npu from second and from first"):
        make_device("npu", module="second")
    accelerators.forget("npu")
    make_device("npu", module="second")


def test_hooks_match_overridable_device_functions() -> None:
    hooked = {name for name, value in vars(device).items() if hasattr(value, "__wrapped__") and callable(value)}
    assert hooked - {"_copy_stream"} == accelerators.HOOKS


def test_documented_plug_in_example_registers_device(make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vendor's package is a stand-in; what the code itself asks of it is what the document lists."""
    text = (Path(__file__).parents[1] / "docs" / "accelerators.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)
    tpu_generator = torch.Generator()
    module = SimpleNamespace(is_available=lambda: True, default_generators=())
    monkeypatch.setattr(torch, "tpu", module, raising=False)
    monkeypatch.setitem(sys.modules, "torch_tpu", None)
    exec(compile(code, "accelerators.md", "exec"), {"__name__": "megatron_accelerator_tpu"})
    assert device.choose() == "cpu", "without the vendor's package there is no device"
    monkeypatch.setitem(sys.modules, "torch_tpu", ModuleType("torch_tpu"))
    assert (device.choose(), device.backend("tpu"), device.default_precision("tpu")) == (
        "tpu",
        "cpu:gloo,tpu:sccl",
        "bf16",
    )
    plugin = accelerators.find("tpu")
    assert plugin is not None
    torch_device = SimpleNamespace(type="tpu", index=0)
    assert plugin.hooks["default_generator"](torch_device) is torch.default_generator
    module.default_generators = (tpu_generator,)
    assert plugin.hooks["default_generator"](torch_device) is tpu_generator and not device.can_pin("tpu")


def test_accelerator_docs_name_every_hook_field_and_check() -> None:
    text = (Path(__file__).parents[1] / "docs" / "accelerators.md").read_text(encoding="utf-8")
    fields = {field.name for field in dataclasses.fields(Accelerator)} - {"module"}
    checks = {check.__name__ for check in check_accelerator.CHECKS}
    assert {f"`{name}`" for name in fields | accelerators.HOOKS | checks} - set(re.findall(r"`\w+`", text)) == set()

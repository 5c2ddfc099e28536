"""The plug-in for Ascend NPUs: its calls against torch-npu's Python files, and its hooks on a stub of torch.npu.

No test runs on an NPU. TORCH_NPU_WHEEL=FILE.whl, from ``pip download --no-deps torch-npu==2.13.0``, enables the slow
tests; an installed torch-npu does, too.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron import accelerators, device
from tests.helpers.python_contract import accepts, calls, defined_names, used_attributes

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "examples" / "accelerator_npu" / "megatron_accelerator_npu.py"
VARIABLE = "TORCH_NPU_WHEEL"
GENERIC_NAMES = ("get_rng_state", "set_rng_state", "manual_seed_all", "_is_in_bad_fork", "is_initialized")
"""Names of ``torch.npu`` that torch's own functions for seeds and random states look up."""


@pytest.fixture(scope="module")
def torch_npu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of torch-npu's Python files."""
    wheel, spec = os.environ.get(VARIABLE), importlib.util.find_spec("torch_npu")
    if wheel:
        folder = tmp_path_factory.mktemp("wheel")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
        return folder / "torch_npu"
    if spec is None or spec.origin is None:
        pytest.skip(
            f"torch-npu is not installed: pip download --no-deps torch-npu==2.13.0, then {VARIABLE}=FILE.whl; "
            "its Python files are read, not run"
        )
    return Path(spec.origin).parent


def missing_names(torch_npu: Path, source: Path) -> list[str]:
    """Return names of ``torch.npu`` that a file uses and torch-npu lacks, and calls with wrong numbers of arguments."""
    defined = defined_names(torch_npu / "npu")
    listed = defined.get("__all__")  # some tensor types are only listed: a compiled library defines them
    names = {*defined, *(ast.literal_eval(listed.value) if isinstance(listed, ast.Assign) else ())}
    missing = used_attributes(source, "torch.npu") - names
    wrong = [
        f"{name} with {num_args} arguments"
        for name, num_args in calls(source, "torch.npu")
        if isinstance(defined.get(name), ast.FunctionDef) and not accepts(defined[name], num_args)
    ]
    return sorted([*missing, *wrong])


@pytest.mark.slow
def test_torch_npu_defines_names_of_plugin_and_of_torch(torch_npu: Path) -> None:
    assert missing_names(torch_npu, PLUGIN) == []
    assert set(GENERIC_NAMES) <= defined_names(torch_npu / "npu").keys()


@pytest.mark.slow
def test_torch_npu_defines_names_of_deepspeed_accelerator(torch_npu: Path) -> None:
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent / "accelerator" / "npu_accelerator.py"
    assert len(used_attributes(source, "torch.npu")) > 20
    assert missing_names(torch_npu, source) == []


@pytest.mark.slow
def test_torch_npu_registers_device_and_backend(torch_npu: Path) -> None:
    found = {
        ast.unparse(node)
        for path in torch_npu.rglob("*.py")
        if any(
            word in (text := path.read_text(encoding="utf-8")) for word in ("rename_privateuse1", "register_backend")
        )
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
    }
    assert any(call.endswith("rename_privateuse1_backend('npu')") for call in found)
    assert any(call.endswith("_register_device_module('npu', torch_npu.npu)") for call in found)
    registrations = [call for call in found if "register_backend('hccl'" in call]
    assert registrations and all("devices=['npu']" in call for call in registrations)


@pytest.mark.slow
def test_torch_npu_streams_have_methods_of_hooks(torch_npu: Path) -> None:
    stream = defined_names(torch_npu / "npu" / "streams.py")["Stream"]
    assert isinstance(stream, ast.ClassDef)
    methods = {node.name for node in stream.body if isinstance(node, ast.FunctionDef)}
    assert {"query", "synchronize", "wait_stream", "wait_event", "record_event"} <= methods


def test_contract_reader_finds_missing_and_wrong_calls(tmp_path: Path) -> None:
    package = tmp_path / "torch_npu" / "npu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from .utils import synchronize\nfrom .memory import *\n"
        "try:\n    count: int = 1\nexcept ImportError:\n    pass\n"
    )
    (package / "utils.py").write_text("def synchronize(device): ...\ndef hidden(): ...\n")
    (package / "memory.py").write_text("__all__ = ['peak']\ndef peak(device=None): ...\ndef private(): ...\n")
    source = tmp_path / "plugin.py"
    source.write_text(
        "torch.npu.synchronize()\ntorch.npu.peak()\ntorch.npu.peak(0)\ntorch.npu.private()\ntorch.npu.hidden\n"
        "torch.npu.count\ntorch.cuda.other()\n"
    )
    assert missing_names(tmp_path / "torch_npu", source) == ["hidden", "private", "synchronize with 0 arguments"]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, list[Any]]]:
    """Import the plug-in with a stub of torch.npu that records calls; unregister it afterwards."""
    recorded: list[Any] = []
    stream = SimpleNamespace(synchronize=lambda: recorded.append("stream"), query=lambda: False)
    stub = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        set_device=lambda index: recorded.append(("set_device", index)),
        init=lambda: recorded.append("init"),
        current_device=lambda: 1,
        get_device_name=lambda device=None: "Ascend910B2",
        is_bf16_supported=lambda: False,
        synchronize=lambda: recorded.append("synchronize"),
        current_stream=lambda device: stream,
        default_stream=lambda device: stream,
        default_generators=("first", "second"),
        max_memory_allocated=lambda: 5,
        mem_get_info=lambda: (3, 64),
    )
    monkeypatch.setattr(torch, "npu", stub, raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.syspath_prepend(str(PLUGIN.parent))
    monkeypatch.delitem(sys.modules, PLUGIN.stem, raising=False)
    yield importlib.import_module(PLUGIN.stem), recorded
    accelerators.forget("npu")


def test_hooks_call_torch_npu(plugin: tuple[ModuleType, list[Any]]) -> None:
    module, recorded = plugin
    npu = SimpleNamespace(type="npu", index=None)  # torch.device("npu") needs torch-npu
    assert device.choose("npu") == "npu"
    assert device.backend("npu") == "cpu:gloo,npu:hccl" and device.default_precision("npu") == "fp16"
    assert device.name("npu") == device.model_name(npu) == "Ascend910B2"
    assert device.peak_memory_bytes("npu") == 5 and device.total_memory_bytes("npu") == 64
    assert device.is_busy(npu) and not device.can_pin("npu") and device.identity(npu) == ""
    assert device.default_generator(npu) == "second"
    device.synchronize("npu")
    device.finish_copies(npu)
    assert recorded == ["init", "synchronize", "stream"]
    with pytest.raises(ValueError, match="LOCAL_RANK must be below .* got 2 and 2"):
        module.bind("npu", 2)


def test_missing_torch_npu_is_reported() -> None:
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(PLUGIN.parent), os.environ.get("PYTHONPATH", "")])}
    environment |= {"MEGATRON_ACCELERATOR": PLUGIN.stem, "DS_ACCELERATOR": "cpu", "PATH": os.environ["PATH"]}
    command = [sys.executable, str(ROOT / "tools" / "check_accelerator.py"), "--device", "npu"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 2 and "--device npu needs a NPU device" in result.stderr, result.stderr

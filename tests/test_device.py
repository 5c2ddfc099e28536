"""The choice of device and what follows from it; torch's CUDA functions are replaced, so no GPU is needed."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron import device
from megatron.errors import ConfigError
from megatron.training import initialize

ROOT = Path(__file__).parents[1]


@pytest.fixture(params=[False, True], ids=["no GPU", "GPU"])
def has_gpu(request, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return request.param


def test_auto_selects_gpu_if_available(has_gpu):
    assert device.choose() == device.choose("auto") == ("cuda" if has_gpu else "cpu")


def test_requested_device_is_selected_or_rejected(has_gpu):
    assert device.choose("cpu") == "cpu"
    if has_gpu:
        assert device.choose("cuda") == "cuda"
    else:
        with pytest.raises(ValueError, match="--device cuda needs a CUDA device .*, found none. Use --device cpu"):
            device.choose("cuda")


def test_ds_accelerator_cpu_makes_auto_select_cpu(has_gpu, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert device.choose() == "cpu"


def test_choose_rejects_unknown_device():
    with pytest.raises(ValueError, match="--device must be auto, cpu or cuda, got tpu"):
        device.choose("tpu")


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "bf16"), (False, "fp16")])
def test_default_precision_depends_on_bf16_support(has_bf16, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert device.default_precision("cuda") == expected
    assert device.default_precision("cpu") == "fp32"


def test_backend_depends_on_device():
    assert (device.backend("cuda"), device.backend("cpu")) == ("nccl", "gloo")


def test_cpu_supports_all_queries():
    assert device.bind("cpu", 3) == torch.device("cpu")
    assert device.name("cpu").startswith("CPU, ")
    assert 0 < device.peak_memory_bytes("cpu") < device.total_memory_bytes("cpu")
    device.synchronize("cpu")


def test_device_identity_has_uuid_and_pci_slot(monkeypatch):
    properties = SimpleNamespace(uuid="8f1c", pci_domain_id=0, pci_bus_id=0x4B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda torch_device: properties)
    assert device.identity(torch.device("cuda", 1)) == "GPU-8f1c at 0000:4b:00"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda torch_device: SimpleNamespace())
    assert [device.identity(torch.device(name)) for name in ("cuda:0", "cpu")] == ["", ""]


def test_bind_rejects_local_rank_beyond_device_count(monkeypatch):
    bound = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", bound.append)
    assert device.bind("cuda", 1) == torch.device("cuda", 1) and bound == [1]
    message = "cuda devices that this process sees, got 2 and 2. Start .*or set LOCAL_RANK=0"
    with pytest.raises(ConfigError, match=message) as error:
        initialize._bind_device("cuda", 2)
    assert bound == [1] and error.value.is_of_this_rank


def test_rng_states_are_restored():
    device.seed(3)
    states = device.rng_states("cpu")
    expected = torch.rand(4)
    device.set_rng_states(states)
    assert torch.equal(torch.rand(4), expected)
    device.seed(3)
    assert torch.equal(torch.rand(4), expected)


def test_only_device_module_calls_cuda():
    paths = set()
    for folder in ("megatron", "tds"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "cuda" in text else ():
                if isinstance(node, ast.Attribute) and node.attr == "cuda" and isinstance(node.value, ast.Name):
                    paths.add(path.relative_to(ROOT).as_posix())
    assert paths <= {"megatron/device.py"}


@pytest.mark.parametrize(("threads", "name"), [(1, "CPU, 1 thread"), (2, "CPU, 2 threads")])
def test_cpu_name_includes_thread_count(monkeypatch, threads, name):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert device.name("cpu") == name

"""The seam and DeepSpeed on one device, and a plug-in's part in it; no device is there but the CPU."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import deepspeed.accelerator as ds_accelerator
import pytest
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from megatron import accelerators
from megatron.accelerators import Accelerator, Adaptor, Patch
from megatron.config import Config, ParallelConfig, PrecisionConfig
from megatron.errors import ConfigError
from megatron.training import device_setup
from tds import device


class PluggedAccelerator(CPU_Accelerator):
    """DeepSpeed's object of a device that nobody has."""

    def device_name(self, device_index: int | None = None) -> str:
        return "plugged"

    def communication_backend_name(self) -> str:
        return "pccl"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Register a device "plugged" whose parts note that they were called."""
    recorded_calls: list[str] = []
    monkeypatch.setattr(accelerators, "_registered", {})
    monkeypatch.setattr(accelerators, "_applied", {})
    monkeypatch.setattr(ds_accelerator.real_accelerator, "ds_accelerator", CPU_Accelerator())
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def deepspeed() -> Any:
        recorded_calls.append("deepspeed")
        return PluggedAccelerator()

    def replace(old: Any) -> str:
        recorded_calls.append("adaptor")
        return "adapted"

    monkeypatch.setattr(os, "adapted_here", "old", raising=False)
    accelerators.register(
        Accelerator(
            name="plugged",
            is_available=lambda: True,
            dtypes=("bf16", "fp32"),
            prepare=lambda: recorded_calls.append("prepare"),
            deepspeed=deepspeed,
            adaptors=(Adaptor("megatron", "mine", (Patch("os.adapted_here", replace, "a test"),)),),
        )
    )
    return recorded_calls


def make_config(device_type: str, **parallel: Any) -> Config:
    return Config(parallel=ParallelConfig(device=device_type, **parallel))


def test_plugin_is_initialized_once_and_deepspeed_uses_its_accelerator(calls: list[str]) -> None:
    assert (
        device_setup.configure_device(make_config("plugged"))
        == device_setup.configure_device(make_config("plugged"))
        == "plugged"
    )
    assert calls == ["prepare", "deepspeed", "adaptor"]
    assert os.environ["DS_ACCELERATOR"] == "plugged" and os.adapted_here == "adapted"  # type: ignore[attr-defined]
    device_setup.check_deepspeed_device("plugged")
    assert device_setup.default_backend("plugged") == "pccl", "what the plug-in leaves open, DeepSpeed's object says"
    assert list(device_setup.device_rows("plugged")) == [("adaptors", "megatron: mine (1)")]
    accelerators.disable("plugged")
    assert os.adapted_here == "old"  # type: ignore[attr-defined]


def test_disabled_adaptors_are_reported(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_ADAPTOR", "1")
    device_setup.configure_device(make_config("plugged"))
    assert calls == ["prepare", "deepspeed"]
    assert list(device_setup.device_rows("plugged")) == [("adaptors", "megatron: mine (1), off")]
    monkeypatch.setenv("DISABLE_ADAPTOR", "yes")
    accelerators.disable("plugged")
    with pytest.raises(ConfigError, match="the environment variable DISABLE_ADAPTOR must be 0 or 1, got 'yes'"):
        device_setup.configure_device(make_config("plugged"))


def test_cpu_initializes_no_plugin(calls: list[str]) -> None:
    assert device_setup.configure_device(make_config("cpu")) == "cpu"
    assert not calls and not list(device_setup.device_rows("cpu"))
    device_setup.check_deepspeed_device("cpu")
    assert (device_setup.default_backend("cpu"), device_setup.default_backend("cuda")) == ("gloo", "nccl")


def test_deepspeed_device_mismatch_raises(calls: list[str]) -> None:
    with pytest.raises(ConfigError, match="use the device of --device, got cpu and cuda.*DS_ACCELERATOR=cuda"):
        device_setup.check_deepspeed_device("cuda")


def test_unsupported_device_dtype_is_rejected(calls: list[str]) -> None:
    config = Config(precision=PrecisionConfig(dtype="fp64"))
    with pytest.raises(ConfigError, match="--device plugged supports bf16, fp32, got --fp64. Use --bf16"):
        device_setup.check_device_fits(config, "plugged")
    device_setup.check_device_fits(Config(), "plugged")
    with pytest.raises(ConfigError, match="fp16 needs a GPU, got a CPU"):
        device_setup.check_device_fits(Config(precision=PrecisionConfig(dtype="fp16")), "cpu")


def test_pipeline_transport_follows_deepspeed_accelerator(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    xpu_device = torch.device("xpu", 0)
    assert device.runs_collectives_on_host() and not device.has_events(xpu_device), "DeepSpeed's CPU needs no events"
    async_accelerator = SimpleNamespace(is_synchronized_device=lambda: False, communication_backend_name=lambda: "xccl")
    monkeypatch.setattr(device, "get_accelerator", lambda: async_accelerator)
    assert (
        not device.runs_collectives_on_host()
        and device.has_events(xpu_device)
        and not device.has_events(torch.device("cpu"))
    )


def test_move_preserves_parameter_identity(calls: list[str]) -> None:
    """The device "meta" stands in for one to which torch moves a module by making new parameters."""
    ds_accelerator.set_accelerator(PluggedAccelerator())
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight, weight = first.weight, first.weight
    weight.fact = "kept"  # type: ignore[attr-defined]
    device.move(torch.nn.ModuleList([first, second]), torch.device("meta"))
    assert first.weight is second.weight is weight and weight.device.type == "meta"
    assert weight.fact == "kept" and weight.requires_grad  # type: ignore[attr-defined]

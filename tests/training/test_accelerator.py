"""The seam and DeepSpeed on one device, and a plug-in's part in it; no device is there but the CPU."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import deepspeed.accelerator as theirs
import pytest
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from megatron import accelerators
from megatron.accelerators import Accelerator, Adaptor, Patch
from megatron.config import Config, ParallelConfig, PrecisionConfig
from megatron.errors import ConfigError
from megatron.training import device_setup
from tds import device


class Plugged(CPU_Accelerator):
    """DeepSpeed's object of a device that nobody has."""

    def device_name(self, device_index: int | None = None) -> str:
        return "plugged"

    def communication_backend_name(self) -> str:
        return "pccl"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Register a device "plugged" whose parts note that they were called."""
    noted: list[str] = []
    monkeypatch.setattr(accelerators, "_registered", {})
    monkeypatch.setattr(accelerators, "_applied", {})
    monkeypatch.setattr(theirs.real_accelerator, "ds_accelerator", CPU_Accelerator())
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def deepspeed() -> Any:
        noted.append("deepspeed")
        return Plugged()

    def replace(old: Any) -> str:
        noted.append("adaptor")
        return "adapted"

    monkeypatch.setattr(os, "adapted_here", "old", raising=False)
    accelerators.register(
        Accelerator(
            name="plugged",
            is_available=lambda: True,
            dtypes=("bf16", "fp32"),
            prepare=lambda: noted.append("prepare"),
            deepspeed=deepspeed,
            adaptors=(Adaptor("megatron", "mine", (Patch("os.adapted_here", replace, "a test"),)),),
        )
    )
    return noted


def config_of(kind: str, **parallel: Any) -> Config:
    return Config(parallel=ParallelConfig(device=kind, **parallel))


def test_a_plug_in_is_opened_once_in_order_and_deepspeed_gets_its_object(calls: list[str]) -> None:
    assert (
        device_setup.configure_device(config_of("plugged"))
        == device_setup.configure_device(config_of("plugged"))
        == "plugged"
    )
    assert calls == ["prepare", "deepspeed", "adaptor"]
    assert os.environ["DS_ACCELERATOR"] == "plugged" and os.adapted_here == "adapted"  # type: ignore[attr-defined]
    device_setup.check_agreement("plugged")
    assert device_setup.backend_of("plugged") == "pccl", "what the plug-in leaves open, DeepSpeed's object says"
    assert list(device_setup.device_rows("plugged")) == [("adaptors", "megatron: mine (1)")]
    accelerators.disable("plugged")
    assert os.adapted_here == "old"  # type: ignore[attr-defined]


def test_adaptors_that_are_switched_off_are_told(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_ADAPTOR", "1")
    device_setup.configure_device(config_of("plugged"))
    assert calls == ["prepare", "deepspeed"]
    assert list(device_setup.device_rows("plugged")) == [("adaptors", "megatron: mine (1), off")]
    monkeypatch.setenv("DISABLE_ADAPTOR", "yes")
    accelerators.disable("plugged")
    with pytest.raises(ConfigError, match="the environment variable DISABLE_ADAPTOR must be 0 or 1, got 'yes'"):
        device_setup.configure_device(config_of("plugged"))


def test_the_cpu_opens_no_plug_in(calls: list[str]) -> None:
    assert device_setup.configure_device(config_of("cpu")) == "cpu"
    assert not calls and not list(device_setup.device_rows("cpu"))
    device_setup.check_agreement("cpu")
    assert (device_setup.backend_of("cpu"), device_setup.backend_of("cuda")) == ("gloo", "nccl")


def test_deepspeed_on_another_device_is_told(calls: list[str]) -> None:
    with pytest.raises(ConfigError, match="use the device of --device, got cpu and cuda.*DS_ACCELERATOR=cuda"):
        device_setup.check_agreement("cuda")


def test_a_format_that_the_device_does_not_compute_in_is_refused(calls: list[str]) -> None:
    config = Config(precision=PrecisionConfig(dtype="fp64"))
    with pytest.raises(ConfigError, match="--device plugged supports bf16, fp32, got --fp64. Use --bf16"):
        device_setup.check_device_fits(config, "plugged")
    device_setup.check_device_fits(Config(), "plugged")
    with pytest.raises(ConfigError, match="fp16 needs a GPU, got a CPU"):
        device_setup.check_device_fits(Config(precision=PrecisionConfig(dtype="fp16")), "cpu")


def test_the_pipelines_seam_goes_by_deepspeeds_accelerator(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    place = torch.device("xpu", 0)
    assert device.sends_over_host() and not device.has_events(place), "DeepSpeed's CPU needs no events"
    queued = SimpleNamespace(is_synchronized_device=lambda: False, communication_backend_name=lambda: "xccl")
    monkeypatch.setattr(device, "get_accelerator", lambda: queued)
    assert not device.sends_over_host() and device.has_events(place) and not device.has_events(torch.device("cpu"))


def test_moved_parameters_stay_the_objects_that_they_are(calls: list[str]) -> None:
    """The device "meta" stands in for one to which torch moves a module by making new parameters."""
    theirs.set_accelerator(Plugged())
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight, weight = first.weight, first.weight
    weight.fact = "kept"  # type: ignore[attr-defined]
    device.move(torch.nn.ModuleList([first, second]), torch.device("meta"))
    assert first.weight is second.weight is weight and weight.device.type == "meta"
    assert weight.fact == "kept" and weight.requires_grad  # type: ignore[attr-defined]

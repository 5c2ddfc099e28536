"""The MFU that a run logs: never above 100 %."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.mpu.groups import single_grid
from megatron.training.callbacks import speed_monitor
from megatron.training.callbacks.speed_monitor import MAX_REMEASUREMENTS, SpeedMonitor
from megatron.training.world import World


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the peaks that are measured, in turn; a test fills the list."""
    values: list[float] = []
    monkeypatch.setattr(speed_monitor, "_measure_matmul_flops", lambda: values.pop(0))
    return values


def make_monitor(device_type: str, peak: float | None) -> Any:
    monitor = SpeedMonitor([0])
    monitor.trainer = SimpleNamespace(world=World(device_type, torch.device("cpu"), single_grid(), 0), pause_s=0.0)  # type: ignore[assignment]
    monitor.peak_flops, monitor.rates = peak, SimpleNamespace(peak_flops=peak)  # type: ignore[assignment]
    monitor._num_remeasurements_left = MAX_REMEASUREMENTS if device_type == "cpu" else 0
    return monitor


def test_peak_is_remeasured_when_mfu_exceeds_one(peaks: list[float]) -> None:
    monitor = make_monitor("cpu", 100.0)
    assert monitor._plausible_mfu(0.9, 90.0) == 0.9
    peaks.append(400.0)
    assert monitor._plausible_mfu(1.8, 180.0) == 180.0 / 400.0
    assert monitor.peak_flops == monitor.rates.peak_flops == 400.0
    assert monitor.trainer.pause_s > 0.0, "the time of the measurement belongs to no step"


def test_persistent_mfu_above_one_is_omitted_and_measurements_end(peaks: list[float]) -> None:
    monitor = make_monitor("cpu", 100.0)
    peaks += [90.0, 110.0, 120.0, 1000.0]
    assert [monitor._plausible_mfu(1.5, 150.0) for _ in range(5)] == [None] * 5
    assert peaks == [1000.0] and monitor.peak_flops == 120.0, "a lower figure never replaces the peak"
    assert monitor._plausible_mfu(0.7, 84.0) == 0.7


def test_gpu_mfu_above_one_is_omitted_without_measurement(peaks: list[float]) -> None:
    monitor = make_monitor("cuda", 100.0)
    assert monitor._plausible_mfu(1.1, 110.0) is None
    assert monitor._plausible_mfu(0.4, 40.0) == 0.4 and monitor._plausible_mfu(None, 40.0) is None

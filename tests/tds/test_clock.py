"""Clocks whose marks cost next to nothing."""

from __future__ import annotations

import time

import pytest
import torch

from tds.clocks import EventClock, HostClock, clock_for, offset_to_wall_ns


def test_host_clock_measures_time_between_marks() -> None:
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    before = clock.mark()
    time.sleep(0.01)
    after = clock.mark()
    assert 0.01 <= clock.seconds(before, after) < 1
    assert clock.nanoseconds(after) - clock.nanoseconds(before) == after - before
    assert clock.is_reached(after)
    clock.align()
    clock.free([before, after])


def test_offset_converts_monotonic_to_wall_clock() -> None:
    assert abs(time.perf_counter_ns() + offset_to_wall_ns() - time.time_ns()) < 50_000_000


@pytest.mark.gpu(only="events on its streams")
def test_gpu_clock_measures_work_and_reuses_events(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    monkeypatch.setattr("tds.device.get_accelerator", CUDA_Accelerator)  # tests have the CPU's by default
    device = torch.device("cuda", 0)
    clock = clock_for(device)
    assert isinstance(clock, EventClock)
    start_ns = time.perf_counter_ns()
    before = clock.mark()
    torch.cuda._sleep(10_000_000)
    after = clock.mark()
    seconds = clock.seconds(before, after)
    assert seconds > 1e-3 and clock.is_reached(after)
    assert abs(clock.nanoseconds(before) - start_ns) < 50_000_000
    clock.free([before, after])
    assert clock.mark() in (before, after)

"""A machine is measured by ranks that work at once, and what they find becomes the rates that the planner reads."""

from __future__ import annotations

import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.planner import calibrate as planner_calibrate
from megatron.planner import layer_benchmarks, microbenchmarks, reference
from megatron.planner.calibrate import MeasuredMachine, calibrate, combine
from megatron.planner.layer_benchmarks import Shape
from megatron.planner.machine import SPLIT_SUFFIX, Link, Machine, named_factors
from megatron.planner.microbenchmarks import COLLECTIVES, Rates, TimingBudget, fit_wire
from megatron.planner.spawn_ranks import Rank, run_ranks

SHORT_BUDGET = TimingBudget(window_s=1e-3, windows=1, max_side=128, num_elements=2**12, num_repetitions=1)
TINY_SHAPES = (Shape(16, 8, 8, 2), Shape(32, 16, 8, 2))
LINK = Link.uniform(bandwidth=1e9, latency_s=1e-5)


def make_reference(scale: float, lost_s: float = 0.0) -> Any:
    """Return a reference by which all that is timed lasts ``scale`` times as long, and ``lost_s`` seconds are lost."""
    return SimpleNamespace(read=lambda: 1.0, scale=lambda: scale, lost_s=lambda before, seconds: lost_s)


STEADY_REFERENCE = make_reference(1.0)


def make_rates(factor: float = 1.0, **overrides: float) -> Rates:
    table = {"fp32": ((64.0, 10.0 * factor), (128.0, 20.0)), "bf16": ((64.0, 30.0),)}
    values = {"stream": 5.0, "update": 6.0, "overhead_s": 7.0, "copy": 8.0} | overrides
    return Rates(products=table, **values)


def make_measured_machine(rates: Rates, **overrides: object) -> MeasuredMachine:
    values = {"link": LINK, "memory": 100, "reserved": 10, "host_update": 9.0, "name": "CPU"} | overrides
    return MeasuredMachine(rates, **values)  # type: ignore[arg-type]


def test_joined_machine_has_rates_of_slowest_rank() -> None:
    slow = make_measured_machine(
        make_rates(0.5, stream=4.0, update=5.0, overhead_s=8.0, copy=7.0), memory=90, reserved=12, host_update=8.0
    )
    machine = combine([make_measured_machine(make_rates()), slow], LINK, "cpu", load=0.25)
    assert machine.product_flops == {"fp32": ((64.0, 5.0), (128.0, 20.0)), "bf16": ((64.0, 30.0),)}
    assert (machine.memory_bandwidth, machine.update_bandwidth, machine.overhead_s) == (4.0, 5.0, 8.0)
    assert (machine.host_bandwidth, machine.host_update_bandwidth) == (7.0, 8.0)
    assert (machine.memory_bytes, machine.reserved_bytes, machine.devices_per_node) == (90, 12, 2)
    assert machine.peak_flops == {"fp32": 20.0, "bf16": 30.0} and machine.is_cpu
    assert "load 0.2" in machine.notes and "over gloo" not in machine.notes


def test_calibration_is_scaled_to_median_reading() -> None:
    """All was scaled to the first reading, in a second twice as fast as the others."""
    plain = combine([make_measured_machine(make_rates())], LINK, "cpu")
    machine = combine([make_measured_machine(make_rates(), readings=(1.0, 2.0, 2.0, 7.0))], LINK, "cpu")
    assert machine == replace(plain, reference_s=1.0).slowed(2.0)
    assert (machine.reference_s, machine.overhead_s, machine.memory_bandwidth) == (2.0, 14.0, 2.5)
    assert plain.reference_s == 0.0


def test_known_gpu_uses_data_sheet_peak() -> None:
    machine = combine([make_measured_machine(make_rates(), name="NVIDIA H100 80GB HBM3")], LINK, "cuda")
    assert machine.peak_flops == {"fp32": 20.0, "bf16": 989e12} and not machine.is_cpu
    assert "over gloo" in machine.notes and "peak_flops" not in machine.notes


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_fit_recovers_latency_and_bandwidth(ranks: int) -> None:
    latencies = math.log2(ranks)
    samples = [(num_bytes, latencies * 3e-5 + num_bytes / 2e9) for num_bytes in (256.0, 4096.0, 1e6, 3e7)]
    link = fit_wire(samples, latencies)
    assert (link.latency_s, link.bandwidth) == (pytest.approx(3e-5), pytest.approx(2e9))


def test_fit_minimizes_relative_error() -> None:
    samples = [(256.0, 1.1e-4), (512.0, 0.9e-4), (1e6, 2e-3), (1e8, 0.15)]
    link = fit_wire(samples, 1.0)
    assert link.latency_s == pytest.approx(1e-4, rel=0.1)
    assert link.bandwidth == pytest.approx(6e8, rel=0.15)


def test_fit_handles_inconsistent_times() -> None:
    falling = fit_wire([(100.0, 2.0), (200.0, 1.0)], 1.0)
    assert falling.bandwidth == 200.0 and falling.latency_s > 0
    steep = fit_wire([(100.0, 1.0), (200.0, 3.0)], 1.0)
    assert steep.latency_s == 1.0 and steep.bandwidth > 0
    with pytest.raises(ValueError, match="two sizes"):
        fit_wire([(100.0, 1.0), (100.0, 2.0)], 1.0)


def test_collective_share_matches_ring() -> None:
    assert [COLLECTIVES["all_reduce"].share(4), COLLECTIVES["gather"].share(4), COLLECTIVES["send"].share(4)] == [
        1.5,
        0.75,
        1.0,
    ]
    assert COLLECTIVES["scatter"].share(4) == 0.75
    assert [COLLECTIVES[name].latencies(8) for name in ("all_reduce", "gather", "scatter", "send")] == [
        3.0,
        3.0,
        3.0,
        1.0,
    ]


def test_turns_per_s_uses_median_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of 100 s (the first), then 1, 4 and 2 s for each window: the median rate is one in 2 s."""
    clock, turns = [0.0], iter([100.0, 1.0, 1.0, 4.0, 2.0])
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(reference, "queue_time_s", lambda: 0.0)

    def turn() -> None:
        clock[0] += next(turns)

    rank = Rank(0, 1, "cpu", "", 1)
    assert microbenchmarks._runs_per_s(rank, turn, TimingBudget(window_s=0.5, windows=3), STEADY_REFERENCE) == 0.5
    assert next(turns, None) is None


def test_rates_are_work_times_turns_per_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbenchmarks, "_runs_per_s", lambda *_: 10.0)
    monkeypatch.setattr(Rank, "max_over_ranks", lambda rank, seconds: 1.0)
    budget = TimingBudget(num_elements=2**12)
    measured = microbenchmarks.measure_rates(Rank(0, 1, "cpu", "", 1), ("fp32", "bf16"), budget, STEADY_REFERENCE)
    assert measured.products["fp32"][1] == (128.0, 6 * 128**3 * 10.0)  # three products of 2 side^3
    assert measured.products["bf16"][-1][0] == microbenchmarks.MIN_SIDE  # the turn above was too long to go on
    assert measured.stream == 16 * 4 * 2**12 * 10.0
    assert measured.update == 32 * 2**12 * 10.0
    assert measured.copy == 2 * 4 * 2**12 * 10.0
    assert measured.overhead_s == 1 / (400 * 10.0)


def test_probes_run() -> None:
    device = torch.device("cpu")
    update = microbenchmarks._update(device, SHORT_BUDGET)
    update()
    rank = Rank(0, 1, "cpu", "", 1)
    for turn in (
        microbenchmarks._product(device, "bf16", 8),
        microbenchmarks._stream(rank, "fp32", SHORT_BUDGET),
        microbenchmarks._chain(device),
    ):
        turn()
        turn()


@pytest.mark.slow
def test_calibrate_with_two_ranks_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(layer_benchmarks, "SHAPES", {True: TINY_SHAPES})
    monkeypatch.setattr(layer_benchmarks, "TOUCHED_BYTES", 0)
    monkeypatch.setattr(reference, "TOKENS", 4)
    machine = calibrate(
        2, "cpu", report=messages.append, timing_budget=SHORT_BUDGET, message_bytes=(256, 65536), round_s=1e-3
    )
    assert machine == Machine.from_json(machine.to_json())
    assert machine.devices_per_node == 2 and [side for side, _ in machine.product_flops["fp32"]] == [64.0, 128.0]
    assert min(machine.memory_bandwidth, machine.update_bandwidth, machine.overhead_s, machine.host_bandwidth) > 0
    assert 0 < machine.reference_s < 10
    full_types = [layer_type for layer_type in machine.tempos["fp32"] if not layer_type.endswith(SPLIT_SUFFIX)]
    assert set(machine.tempos) == {"bf16", "fp32"} and len(full_types) == 11  # a T5 has two kinds of layers
    assert set(machine.tempos["fp32"]) == set(full_types) | {layer_type + SPLIT_SUFFIX for layer_type in full_types}
    assert set(machine.tempos["bf16"]) == set(full_types)
    assert max(value for _, value in named_factors(machine.tempos)) > 0
    for link in vars(machine.intra).values():
        assert link.latency_s > 0 and link.bandwidth > 0
    assert any("all_reduce" in line for line in messages) and "measured in" in messages[-1]
    assert not multiprocessing.active_children()
    assert not list(tmp_path.iterdir())


def _fail(rank: Rank) -> int:
    if rank.idx == 1:
        raise ValueError("this rank must not")
    rank.barrier()
    return 0


def _die(rank: Rank) -> int:
    if rank.idx == 1:
        os._exit(3)
    return 0


def _sleep(rank: Rank) -> int:
    time.sleep(30.0 if rank.idx else 0.0)
    return 0


def _scale_rank_number(rank: Rank, factor: int) -> int:
    return factor * rank.idx


@pytest.mark.parametrize(
    ("function", "message"),
    [(_fail, "this rank must not"), (_die, "rank 1 of 2: the process died"), (_sleep, "no result from ranks")],
)
def test_failed_rank_is_named_and_all_ranks_end(function: object, message: str) -> None:
    backend = "gloo" if function is _fail else ""
    with pytest.raises(RuntimeError, match=message):
        run_ranks(2, function, backend=backend, deadline_s=5.0 if function is _fail else 0.5)  # type: ignore[arg-type]
    assert not multiprocessing.active_children()


def test_run_ranks_returns_results_in_rank_order() -> None:
    assert run_ranks(3, _scale_rank_number, 7, backend="") == [0, 7, 14]


def test_more_ranks_than_devices_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="got -1"):
        calibrate(-1, "cpu")
    monkeypatch.setattr(planner_calibrate.device, "choose", lambda device_type: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    with pytest.raises(ValueError, match="between 1 and 4, the number of cuda devices, got 8"):
        calibrate(8, "cuda")


def test_busy_machine_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    monkeypatch.setattr(planner_calibrate, "run_ranks", lambda *_, **__: [make_measured_machine(make_rates())])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    machine = calibrate(3, "cpu", report=messages.append)
    assert "load 99.0" in machine.notes and machine.ranks_per_core == 1.5
    assert any("when it is idle" in line for line in messages)


def test_budget_clock_counts_cpu_time_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", lambda: 5.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    monkeypatch.setattr(reference, "queue_time_s", lambda: 3.0)
    assert TimingBudget().now() == 4.0 and TimingBudget(use_cpu_time=True).now() == 5.0
    assert TimingBudget(ranks_per_core=2.0).now() == 10.0 and TimingBudget(use_wall_clock=True).now() == 7.0


@pytest.mark.parametrize(
    ("work_s", "message_s", "expected"), [(0.001, 0.004, 0.004), (0.001, 0.0, microbenchmarks.MIN_MESSAGE_S)]
)
def test_message_time_excludes_preceding_work(
    work_s: float, message_s: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def make_delay(seconds: float) -> Callable[[], None]:
        return lambda: clock.__setitem__(0, clock[0] + seconds)

    monkeypatch.setattr(microbenchmarks, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(microbenchmarks, "_filler_work", lambda rank: make_delay(work_s))
    rank: Any = Rank(0, 1, "cpu", "", 1)
    assert microbenchmarks._message_seconds(rank, make_delay(message_s), 0.05, STEADY_REFERENCE) == pytest.approx(
        expected, rel=1e-6
    )
    slow = microbenchmarks._message_seconds(rank, make_delay(message_s), 0.05, make_reference(0.5))
    assert slow == pytest.approx(max(expected / 2, microbenchmarks.MIN_MESSAGE_S), rel=1e-6)


def test_message_time_excludes_lost_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0])
    monkeypatch.setattr(microbenchmarks, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    message_time_s = microbenchmarks._wall_seconds(
        Rank(0, 1, "cpu", "", 1), lambda: None, 1, make_reference(1.0, lost_s=0.3)
    )
    assert message_time_s == pytest.approx(0.7)


def test_only_cpu_ranks_work_before_message() -> None:
    assert microbenchmarks._filler_work(SimpleNamespace(device_type="cpu"))().shape == (512, 512)
    assert microbenchmarks._filler_work(SimpleNamespace(device_type="cuda"))() is None

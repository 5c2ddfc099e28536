"""What is timed on a machine whose speed changes comes back as if it had one speed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.plan import Case, RankMeasurement, make_config, make_row
from megatron.planner import microbenchmarks, reference
from megatron.planner.calibrate import scale_to_median_speed
from megatron.planner.estimate import Planner
from megatron.planner.layout import layout_of
from megatron.planner.machine import Link, Machine, gpu_machine
from megatron.planner.microbenchmarks import TimingBudget
from megatron.planner.reference import Reference, core_time_s, longest_queue_time, queue_time_s, queue_times
from megatron.planner.spawn_ranks import Rank, run_ranks

SINGLE_RANK = Rank(0, 1, "cpu", "", 1)
REFERENCE_WORK = 0.01
"""Seconds of the reference at speed 1."""


class UnsteadyMachine:
    """A machine whose speed changes by half within seconds, and a clock that runs while it works.

    Args:
        speed: at each moment.
    """

    def __init__(self, speed: Callable[[float], float]) -> None:
        self.time_s, self._speed = 0.0, speed

    def now(self) -> float:
        return self.time_s

    def work(self, seconds: float) -> None:
        """Do what takes so long at speed 1."""
        while seconds > 0:
            step_s = min(seconds, 0.002)
            self.time_s += step_s / self._speed(self.time_s)
            seconds -= step_s


def speed_wave(time_s: float) -> float:
    """Return a speed between 0.5 and 1, of two periods in seconds."""
    return 0.75 + 0.15 * math.sin(2 * math.pi * time_s / 3.1) + 0.1 * math.sin(2 * math.pi * time_s / 1.3)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> UnsteadyMachine:
    unsteady = UnsteadyMachine(speed_wave)
    monkeypatch.setattr(reference, "_mlp", lambda device: lambda: unsteady.work(REFERENCE_WORK))
    monkeypatch.setattr(TimingBudget, "now", lambda self: unsteady.now())
    return unsteady


def test_scale_uses_mean_of_surrounding_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9.0, 9.0, 9.0, 9.0, 3.0, 2.0, 5.0, 4.0, 7.0, 8.0])  # two turns a reading, the shorter counts
    unsteady = UnsteadyMachine(lambda at: 1.0)
    monkeypatch.setattr(reference, "_mlp", lambda device: lambda: unsteady.work(next(seconds)))
    ref = Reference(SINGLE_RANK, unsteady.now)
    assert ref.readings == pytest.approx([2.0])
    assert ref.scale() == pytest.approx(2 / 3)  # between 2 and 4
    assert ref.read_mean() == pytest.approx(5.5)
    assert ref.readings == pytest.approx([2.0, 4.0, 7.0])
    assert (ref.first_s, ref.median_s) == (pytest.approx(2.0), pytest.approx(4.0))


def test_reading_is_median_of_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9.0] * 12 + [3.0, 2.0, 5.0, 4.0, 7.0, 8.0] + [1.0, 6.0, 30.0, 20.0, 6.0, 6.0])
    unsteady = UnsteadyMachine(lambda at: 1.0)
    monkeypatch.setattr(reference, "_mlp", lambda device: lambda: unsteady.work(next(seconds)))
    ref = Reference(SINGLE_RANK, unsteady.now, num_measurements=3)
    assert ref.readings == pytest.approx([4.0])  # of 2, 4 and 7
    assert ref.read_mean() == pytest.approx(5.0)  # the median of 1, 20 and 6, and 4


def test_scaled_rates_are_independent_of_machine_speed(machine: UnsteadyMachine) -> None:
    """At speed 1 a turn takes 20 ms and the reference 10: whatever the speed, a turn is two references."""
    budget = TimingBudget(window_s=0.08, windows=3)
    ref = Reference(SINGLE_RANK, machine.now)
    unscaled_reference: Any = SimpleNamespace(read=lambda: 1.0, scale=lambda: 1.0)
    scaled, unscaled = [], []
    for _ in range(12):
        machine.work(0.37)
        scaled.append(
            1 / microbenchmarks._runs_per_s(SINGLE_RANK, lambda: machine.work(0.02), budget, ref) / ref.first_s
        )
        unscaled.append(
            1 / microbenchmarks._runs_per_s(SINGLE_RANK, lambda: machine.work(0.02), budget, unscaled_reference)
        )
    assert scaled == pytest.approx([2.0] * 12, rel=0.04)
    assert max(unscaled) / min(unscaled) > 1.5


def test_scaled_prediction_meets_tolerance_at_any_speed(machine: UnsteadyMachine) -> None:
    """A step of 100 references, on a machine that was calibrated at another speed than that of the step."""
    ref = Reference(SINGLE_RANK, machine.now)
    num_misses = {True: 0, False: 0}
    for _ in range(20):
        machine.work(0.71)
        calibration_s = ref.read()
        machine.work(0.43)
        ref.read()
        measured = RankMeasurement(0, live_bytes=50, added_bytes=50)
        for _ in range(5):
            start = machine.now()
            machine.work(0.4)
            measured.steps_s.append(machine.now() - start)
            measured.reference_s.append(ref.read_mean())
        estimate: Any = SimpleNamespace(
            memory=[SimpleNamespace(total=100)],
            step_s=0.4 / REFERENCE_WORK * calibration_s,
            seconds_by_activity={},
            bubble=0.0,
        )
        for is_scaled in num_misses:
            row = make_row(Case("gpt2"), estimate, [measured], calibrated_s=calibration_s if is_scaled else 0.0)
            num_misses[is_scaled] += not row.is_time_met
    assert num_misses[True] == 0 and num_misses[False] >= 5


def test_at_usual_speed_scales_to_median_reading() -> None:
    plain = replace(gpu_machine("h100-80g"), is_cpu=True)
    assert scale_to_median_speed(plain, ()) == plain
    assert scale_to_median_speed(plain, (2.0, 2.0, 8.0)) == replace(plain, reference_s=2.0)
    assert scale_to_median_speed(plain, (2.0, 3.0, 8.0)) == replace(plain, reference_s=2.0).slowed(1.5)


@pytest.mark.parametrize(
    "flags",
    ["", "--model-parallel-size 2", "--pipe-parallel-size 2", "--zero-stage 1", "--checkpoint-activations"],
    ids=str,
)
@pytest.mark.parametrize("is_cpu", [True, False])
def test_slowed_machine_scales_all_times(flags: str, is_cpu: bool) -> None:
    """A rate that was left out would keep its seconds."""
    link = Link.uniform(1e9, 1e-4)
    plain = replace(gpu_machine("h100-80g"), is_cpu=is_cpu, intra=link, inter=link, reference_s=1.0)
    config = make_config(Case("gpt2", 2, flags), is_smoke=True)
    layout = layout_of(config, 2)
    for candidate in (layout, replace(layout, offload_optimizer=True)) if layout.zero_stage else (layout,):
        before, after = (Planner(config, variant).estimate(candidate) for variant in (plain, plain.slowed(1.7)))
        assert after.seconds_by_activity == pytest.approx(
            {name: 1.7 * seconds for name, seconds in before.seconds_by_activity.items()}
        )
        assert after.mfu == pytest.approx(before.mfu)
        assert after.max_bytes == before.max_bytes
    assert plain.slowed(1.7).reference_s == 1.7
    assert Machine.from_json(plain.to_json()).reference_s == 1.0


def _read_reference(rank: Rank) -> list[float]:
    """Return what a rank reads whose clock runs ten times as fast as the other's."""
    ref = Reference(rank, lambda: (1 + 9 * rank.idx) * time.perf_counter())
    return [*ref.readings, ref.read()]


def test_slowest_rank_reading_is_used_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = run_ranks(2, _read_reference)
    assert first == second and min(first) > 0


def test_gpu_reference_does_not_scale() -> None:
    ref = Reference(Rank(0, 1, "cuda", "", 1), time.perf_counter)
    assert (ref.scale(), ref.read_mean(), ref.median_s) == (1.0, 1.0, 1.0)


def test_waited_s_reads_schedstat(monkeypatch: pytest.MonkeyPatch) -> None:
    before = queue_time_s()
    assert queue_time_s() >= before >= 0.0 == queue_time_s(2**30)  # no such thread
    monkeypatch.setattr(os, "read", lambda *_: b"7000000000 3000000000 12\n")
    assert queue_time_s() == 3.0
    monkeypatch.setattr(os, "read", lambda *_: b"")
    assert queue_time_s() == 0.0


def test_longest_wait_uses_slowest_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_by_thread = {1: 5.0, 2: 9.0, 3: 2.5}
    monkeypatch.setattr(os, "listdir", lambda _: [str(thread) for thread in waited_by_thread])
    monkeypatch.setattr(reference, "queue_time_s", lambda thread: waited_by_thread[thread])
    before = queue_times()
    assert longest_queue_time(before) == 0.0
    waited_by_thread |= {1: 6.0, 2: 9.5, 4: 0.75}
    assert longest_queue_time(before) == 1.0


@pytest.mark.parametrize(
    ("device_type", "world_size", "busy_seconds", "expected"),
    [
        ("cpu", 2, 18.0, 0.3),
        ("cpu", 2, 10.5, 0.05),
        ("cpu", 2, 9.0, 0.0),
        ("cpu", 4, 18.0, 0.4),
        ("cuda", 2, 18.0, 0.0),
    ],
)
def test_lost_time_is_limited_by_other_programs_cpu_time(
    device_type: str, world_size: int, busy_seconds: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds after its start, in which the ranks had ten seconds of the cores, and a thread waited 0.3 of 1."""
    clocks = {"wall": 100.0, "busy": 50.0, "cpu": 7.0}
    monkeypatch.setattr(reference, "_mlp", lambda device: lambda: None)
    monkeypatch.setattr(time, "perf_counter", lambda: clocks["wall"])
    monkeypatch.setattr(time, "process_time", lambda: clocks["cpu"])
    monkeypatch.setattr(reference, "busy_s", lambda: clocks["busy"])
    monkeypatch.setattr(reference, "longest_queue_time", lambda before: 0.1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(Rank, "sum_over_ranks", lambda rank, value: 2 * value)
    monkeypatch.setattr(Rank, "max_over_ranks", lambda rank, value: value + 0.2)  # another rank waited longer
    ref = Reference(Rank(0, world_size, device_type, "", 1), time.perf_counter)
    clocks |= {"wall": 110.0, "busy": 50.0 + busy_seconds, "cpu": 12.0}
    assert ref.lost_s({}, 1.0) == pytest.approx(expected)


def test_wait_between_clock_reads_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread loses its core for 5 s right behind the first look at the wall clock, at 100."""
    wall, queue = iter([100.0, 105.0]), iter([3.0, 8.0, 8.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(reference, "queue_time_s", lambda: next(queue))
    assert core_time_s() == 97.0

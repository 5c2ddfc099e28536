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

from benchmarks.plan import Case, Measured, config_of, row_of
from megatron.planner import microbenchmarks, reference
from megatron.planner.calibrate import at_usual_speed
from megatron.planner.estimate import Planner
from megatron.planner.layout import layout_of
from megatron.planner.machine import Link, Machine, device
from megatron.planner.microbenchmarks import TimingBudget
from megatron.planner.reference import Reference, longest_wait, own_core_s, waited_s, waits
from megatron.planner.spawn_ranks import Rank, run_ranks

ALONE = Rank(0, 1, "cpu", "", 1)
REFERENCE_WORK = 0.01
"""Seconds of the reference at speed 1."""


class Unsteady:
    """A machine whose speed changes by half within seconds, and a clock that runs while it works.

    Args:
        speed: at each moment.
    """

    def __init__(self, speed: Callable[[float], float]) -> None:
        self.at, self._speed = 0.0, speed

    def now(self) -> float:
        return self.at

    def work(self, seconds: float) -> None:
        """Do what takes so long at speed 1."""
        while seconds > 0:
            piece = min(seconds, 0.002)
            self.at += piece / self._speed(self.at)
            seconds -= piece


def waves(at: float) -> float:
    """Return a speed between 0.5 and 1, of two periods in seconds."""
    return 0.75 + 0.15 * math.sin(2 * math.pi * at / 3.1) + 0.1 * math.sin(2 * math.pi * at / 1.3)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Unsteady:
    made = Unsteady(waves)
    monkeypatch.setattr(reference, "_mlp", lambda place: lambda: made.work(REFERENCE_WORK))
    monkeypatch.setattr(TimingBudget, "now", lambda self: made.now())
    return made


def test_a_time_is_taken_beside_the_readings_ahead_of_it_and_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9.0, 9.0, 9.0, 9.0, 3.0, 2.0, 5.0, 4.0, 7.0, 8.0])  # two turns a reading, the shorter counts
    made = Unsteady(lambda at: 1.0)
    monkeypatch.setattr(reference, "_mlp", lambda place: lambda: made.work(next(seconds)))
    read = Reference(ALONE, made.now)
    assert read.readings == pytest.approx([2.0])
    assert read.scale() == pytest.approx(2 / 3)  # between 2 and 4
    assert read.beside() == pytest.approx(5.5)
    assert read.readings == pytest.approx([2.0, 4.0, 7.0])
    assert (read.unit_s, read.usual_s) == (pytest.approx(2.0), pytest.approx(4.0))


def test_of_several_looks_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9.0] * 12 + [3.0, 2.0, 5.0, 4.0, 7.0, 8.0] + [1.0, 6.0, 30.0, 20.0, 6.0, 6.0])
    made = Unsteady(lambda at: 1.0)
    monkeypatch.setattr(reference, "_mlp", lambda place: lambda: made.work(next(seconds)))
    read = Reference(ALONE, made.now, looks=3)
    assert read.readings == pytest.approx([4.0])  # of 2, 4 and 7
    assert read.beside() == pytest.approx(5.0)  # the median of 1, 20 and 6, and 4


def test_rates_of_a_machine_that_changes_its_speed_are_those_of_one_speed(machine: Unsteady) -> None:
    """At speed 1 a turn takes 20 ms and the reference 10: whatever the speed, a turn is two references."""
    pace = TimingBudget(window_s=0.08, windows=3)
    read = Reference(ALONE, machine.now)
    plain: Any = SimpleNamespace(read=lambda: 1.0, scale=lambda: 1.0)
    scaled, unscaled = [], []
    for _ in range(12):
        machine.work(0.37)
        scaled.append(1 / microbenchmarks._turns_per_s(ALONE, lambda: machine.work(0.02), pace, read) / read.unit_s)
        unscaled.append(1 / microbenchmarks._turns_per_s(ALONE, lambda: machine.work(0.02), pace, plain))
    assert scaled == pytest.approx([2.0] * 12, rel=0.04)
    assert max(unscaled) / min(unscaled) > 1.5


def test_steps_and_calibration_at_speeds_of_their_own_meet_within_the_bar(machine: Unsteady) -> None:
    """A step of 100 references, on a machine that was calibrated at another speed than that of the step."""
    read = Reference(ALONE, machine.now)
    far = {True: 0, False: 0}
    for _ in range(20):
        machine.work(0.71)
        calibrated = read.read()
        machine.work(0.43)
        read.read()
        found = Measured(0, held_bytes=50, added_bytes=50)
        for _ in range(5):
            start = machine.now()
            machine.work(0.4)
            found.steps_s.append(machine.now() - start)
            found.reference_s.append(read.beside())
        estimate: Any = SimpleNamespace(
            memory=[SimpleNamespace(total=100)], step_s=0.4 / REFERENCE_WORK * calibrated, parts={}, bubble=0.0
        )
        for is_scaled in far:
            row = row_of(Case("gpt2"), estimate, [found], calibrated_s=calibrated if is_scaled else 0.0)
            far[is_scaled] += not row.is_time_met
    assert far[True] == 0 and far[False] >= 5


def test_a_calibration_is_given_at_the_speed_of_the_median_reading() -> None:
    plain = replace(device("h100-80g"), is_cpu=True)
    assert at_usual_speed(plain, ()) == plain
    assert at_usual_speed(plain, (2.0, 2.0, 8.0)) == replace(plain, reference_s=2.0)
    assert at_usual_speed(plain, (2.0, 3.0, 8.0)) == replace(plain, reference_s=2.0).slowed(1.5)


@pytest.mark.parametrize(
    "flags",
    ["", "--model-parallel-size 2", "--pipe-parallel-size 2", "--zero-stage 1", "--checkpoint-activations"],
    ids=str,
)
@pytest.mark.parametrize("is_cpu", [True, False])
def test_everything_takes_longer_on_a_slowed_machine(flags: str, is_cpu: bool) -> None:
    """A rate that was left out would keep its seconds."""
    link = Link.of(1e9, 1e-4)
    plain = replace(device("h100-80g"), is_cpu=is_cpu, intra=link, inter=link, reference_s=1.0)
    config = config_of(Case("gpt2", 2, flags), is_smoke=True)
    layout = layout_of(config, 2)
    for given in (layout, replace(layout, offload_optimizer=True)) if layout.zero_stage else (layout,):
        before, after = (Planner(config, one).estimate(given) for one in (plain, plain.slowed(1.7)))
        assert after.parts == pytest.approx({name: 1.7 * own for name, own in before.parts.items()})
        assert after.mfu == pytest.approx(before.mfu)
        assert after.most_bytes == before.most_bytes
    assert plain.slowed(1.7).reference_s == 1.7
    assert Machine.from_json(plain.to_json()).reference_s == 1.0


def _reading(rank: Rank) -> list[float]:
    """Return what a rank reads whose clock runs ten times as fast as the other's."""
    read = Reference(rank, lambda: (1 + 9 * rank.number) * time.perf_counter())
    return [*read.readings, read.read()]


def test_the_slowest_rank_s_reading_counts_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = run_ranks(2, _reading)
    assert first == second and min(first) > 0


def test_on_a_gpu_nothing_is_scaled() -> None:
    read = Reference(Rank(0, 1, "cuda", "", 1), time.perf_counter)
    assert (read.scale(), read.beside(), read.usual_s) == (1.0, 1.0, 1.0)


def test_time_in_the_run_queue_is_what_the_system_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = waited_s()
    assert waited_s() >= before >= 0.0 == waited_s(2**30)  # no such thread
    monkeypatch.setattr(os, "read", lambda *_: b"7000000000 3000000000 12\n")
    assert waited_s() == 3.0
    monkeypatch.setattr(os, "read", lambda *_: b"")
    assert waited_s() == 0.0


def test_the_thread_counts_that_waited_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {1: 5.0, 2: 9.0, 3: 2.5}
    monkeypatch.setattr(os, "listdir", lambda _: [str(thread) for thread in now])
    monkeypatch.setattr(reference, "waited_s", lambda thread: now[thread])
    before = waits()
    assert longest_wait(before) == 0.0
    now |= {1: 6.0, 2: 9.5, 4: 0.75}
    assert longest_wait(before) == 1.0


@pytest.mark.parametrize(
    ("kind", "size", "busy", "wanted"),
    [
        ("cpu", 2, 18.0, 0.3),
        ("cpu", 2, 10.5, 0.05),
        ("cpu", 2, 9.0, 0.0),
        ("cpu", 4, 18.0, 0.4),
        ("cuda", 2, 18.0, 0.0),
    ],
)
def test_what_waits_is_lost_as_far_as_other_programs_were_at_work(
    kind: str, size: int, busy: float, wanted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds after its start, in which the ranks had ten seconds of the cores, and a thread waited 0.3 of 1."""
    moments = {"wall": 100.0, "busy": 50.0, "cpu": 7.0}
    monkeypatch.setattr(reference, "_mlp", lambda place: lambda: None)
    monkeypatch.setattr(time, "perf_counter", lambda: moments["wall"])
    monkeypatch.setattr(time, "process_time", lambda: moments["cpu"])
    monkeypatch.setattr(reference, "busy_s", lambda: moments["busy"])
    monkeypatch.setattr(reference, "longest_wait", lambda before: 0.1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(Rank, "sum", lambda rank, value: 2 * value)
    monkeypatch.setattr(Rank, "most", lambda rank, value: value + 0.2)  # another rank waited longer
    read = Reference(Rank(0, size, kind, "", 1), time.perf_counter)
    moments |= {"wall": 110.0, "busy": 50.0 + busy, "cpu": 12.0}
    assert read.lost_s({}, 1.0) == pytest.approx(wanted)


def test_a_wait_between_the_two_clocks_is_counted_by_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread loses its core for 5 s right behind the first look at the wall clock, at 100."""
    wall, queue = iter([100.0, 105.0]), iter([3.0, 8.0, 8.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(reference, "waited_s", lambda: next(queue))
    assert own_core_s() == 97.0

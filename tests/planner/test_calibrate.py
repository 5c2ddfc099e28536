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
from megatron.planner.calibrate import MeasuredMachine, calibrate, joined
from megatron.planner.layer_benchmarks import Shape
from megatron.planner.machine import CUT, Link, Machine, numbers
from megatron.planner.microbenchmarks import KINDS, Rates, TimingBudget, fitted
from megatron.planner.spawn_ranks import Rank, run_ranks

SHORT = TimingBudget(window_s=1e-3, windows=1, largest_side=128, numbers=2**12, turns=1)
TINY = (Shape(16, 8, 8, 2), Shape(32, 16, 8, 2))
LINK = Link.of(bandwidth=1e9, latency_s=1e-5)


def at_scale(scale: float, lost: float = 0.0) -> Any:
    """Return a reference by which all that is timed lasts ``scale`` times as long, and ``lost`` seconds are lost."""
    return SimpleNamespace(read=lambda: 1.0, scale=lambda: scale, lost_s=lambda before, seconds: lost)


STEADY = at_scale(1.0)


def rates(factor: float = 1.0, **others: float) -> Rates:
    table = {"fp32": ((64.0, 10.0 * factor), (128.0, 20.0)), "bf16": ((64.0, 30.0),)}
    given = {"stream": 5.0, "update": 6.0, "overhead_s": 7.0, "copy": 8.0} | others
    return Rates(products=table, **given)


def found(rates: Rates, **others: object) -> MeasuredMachine:
    given = {"link": LINK, "memory": 100, "reserved": 10, "host_update": 9.0, "name": "CPU"} | others
    return MeasuredMachine(rates, **given)  # type: ignore[arg-type]


def test_a_machine_is_as_fast_as_its_slowest_rank() -> None:
    slow = found(rates(0.5, stream=4.0, update=5.0, overhead_s=8.0, copy=7.0), memory=90, reserved=12, host_update=8.0)
    machine = joined([found(rates()), slow], LINK, "cpu", load=0.25)
    assert machine.product_flops == {"fp32": ((64.0, 5.0), (128.0, 20.0)), "bf16": ((64.0, 30.0),)}
    assert (machine.memory_bandwidth, machine.update_bandwidth, machine.overhead_s) == (4.0, 5.0, 8.0)
    assert (machine.host_bandwidth, machine.host_update_bandwidth) == (7.0, 8.0)
    assert (machine.memory_bytes, machine.reserved_bytes, machine.devices_per_node) == (90, 12, 2)
    assert machine.peak_flops == {"fp32": 20.0, "bf16": 30.0} and machine.is_cpu
    assert "load of 0.2" in machine.notes and "over gloo" not in machine.notes


def test_a_calibration_has_the_speed_of_its_median_reading() -> None:
    """All was scaled to the first reading, in a second twice as fast as the others."""
    plain = joined([found(rates())], LINK, "cpu")
    machine = joined([found(rates(), readings=(1.0, 2.0, 2.0, 7.0))], LINK, "cpu")
    assert machine == replace(plain, reference_s=1.0).slowed(2.0)
    assert (machine.reference_s, machine.overhead_s, machine.memory_bandwidth) == (2.0, 14.0, 2.5)
    assert plain.reference_s == 0.0


def test_a_known_gpu_has_the_peak_of_its_data_sheet() -> None:
    machine = joined([found(rates(), name="NVIDIA H100 80GB HBM3")], LINK, "cuda")
    assert machine.peak_flops == {"fp32": 20.0, "bf16": 989e12} and not machine.is_cpu
    assert "over gloo" in machine.notes and "peak_flops" not in machine.notes


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_latency_and_bandwidth_come_back_from_the_times_that_they_make(ranks: int) -> None:
    latencies = math.log2(ranks)
    samples = [(sent, latencies * 3e-5 + sent / 2e9) for sent in (256.0, 4096.0, 1e6, 3e7)]
    wire = fitted(samples, latencies)
    assert (wire.latency_s, wire.bandwidth) == (pytest.approx(3e-5), pytest.approx(2e9))


def test_relative_errors_count_so_long_messages_do_not_hide_the_latency() -> None:
    samples = [(256.0, 1.1e-4), (512.0, 0.9e-4), (1e6, 2e-3), (1e8, 0.15)]
    wire = fitted(samples, 1.0)
    assert wire.latency_s == pytest.approx(1e-4, rel=0.1)
    assert wire.bandwidth == pytest.approx(6e8, rel=0.15)


def test_times_that_make_no_line_still_give_a_latency_and_a_bandwidth() -> None:
    falling = fitted([(100.0, 2.0), (200.0, 1.0)], 1.0)
    assert falling.bandwidth == 200.0 and falling.latency_s > 0
    steep = fitted([(100.0, 1.0), (200.0, 3.0)], 1.0)
    assert steep.latency_s == 1.0 and steep.bandwidth > 0
    with pytest.raises(ValueError, match="two sizes"):
        fitted([(100.0, 1.0), (100.0, 2.0)], 1.0)


def test_a_rank_sends_the_share_of_a_ring() -> None:
    assert [KINDS["all_reduce"].share(4), KINDS["gather"].share(4), KINDS["send"].share(4)] == [1.5, 0.75, 1.0]
    assert KINDS["scatter"].share(4) == 0.75
    assert [KINDS[name].latencies(8) for name in ("all_reduce", "gather", "scatter", "send")] == [3.0, 3.0, 3.0, 1.0]


def test_the_median_window_counts_and_the_turns_ahead_of_it_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of 100 s (the first), then 1, 4 and 2 s for each window: the median rate is one in 2 s."""
    now, turns = [0.0], iter([100.0, 1.0, 1.0, 4.0, 2.0])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(reference, "waited_s", lambda: 0.0)

    def turn() -> None:
        now[0] += next(turns)

    alone = Rank(0, 1, "cpu", "", 1)
    assert microbenchmarks._turns_per_s(alone, turn, TimingBudget(window_s=0.5, windows=3), STEADY) == 0.5
    assert next(turns, None) is None


def test_work_is_counted_by_the_turns_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbenchmarks, "_turns_per_s", lambda *_: 10.0)
    monkeypatch.setattr(Rank, "most", lambda rank, seconds: 1.0)
    pace = TimingBudget(numbers=2**12)
    measured = microbenchmarks.rates_of(Rank(0, 1, "cpu", "", 1), ("fp32", "bf16"), pace, STEADY)
    assert measured.products["fp32"][1] == (128.0, 6 * 128**3 * 10.0)  # three products of 2 side^3
    assert measured.products["bf16"][-1][0] == microbenchmarks.LEAST_SIDE  # the turn above was too long to go on
    assert measured.stream == 16 * 4 * 2**12 * 10.0
    assert measured.update == 32 * 2**12 * 10.0
    assert measured.copy == 2 * 4 * 2**12 * 10.0
    assert measured.overhead_s == 1 / (400 * 10.0)


def test_probes_do_what_they_are_counted_for() -> None:
    place = torch.device("cpu")
    x = microbenchmarks._update(place, SHORT)
    x()
    alone = Rank(0, 1, "cpu", "", 1)
    for turn in (
        microbenchmarks._product(place, "bf16", 8),
        microbenchmarks._stream(alone, "fp32", SHORT),
        microbenchmarks._chain(place),
    ):
        turn()
        turn()


@pytest.mark.slow
def test_two_ranks_measure_a_machine_and_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(layer_benchmarks, "SHAPES", {True: TINY})
    monkeypatch.setattr(layer_benchmarks, "TOUCHED", 0)
    monkeypatch.setattr(reference, "TOKENS", 4)
    machine = calibrate(2, "cpu", report=messages.append, pace=SHORT, sizes=(256, 65536), round_s=1e-3)
    assert machine == Machine.from_json(machine.to_json())
    assert machine.devices_per_node == 2 and [side for side, _ in machine.product_flops["fp32"]] == [64.0, 128.0]
    assert min(machine.memory_bandwidth, machine.update_bandwidth, machine.overhead_s, machine.host_bandwidth) > 0
    assert 0 < machine.reference_s < 10
    whole = [kind for kind in machine.tempos["fp32"] if not kind.endswith(CUT)]
    assert set(machine.tempos) == {"bf16", "fp32"} and len(whole) == 11  # a T5 has two kinds of layers
    assert set(machine.tempos["fp32"]) == set(whole) | {kind + CUT for kind in whole}
    assert set(machine.tempos["bf16"]) == set(whole)
    assert max(value for _, value in numbers(machine.tempos)) > 0
    for wire in vars(machine.intra).values():
        assert wire.latency_s > 0 and wire.bandwidth > 0
    assert any("all_reduce" in line for line in messages) and "measured in" in messages[-1]
    assert not multiprocessing.active_children()
    assert not list(tmp_path.iterdir())


def _fail(rank: Rank) -> int:
    if rank.number == 1:
        raise ValueError("this rank must not")
    rank.meet()
    return 0


def _die(rank: Rank) -> int:
    if rank.number == 1:
        os._exit(3)
    return 0


def _sleep(rank: Rank) -> int:
    time.sleep(30.0 if rank.number else 0.0)
    return 0


def _number(rank: Rank, factor: int) -> int:
    return factor * rank.number


@pytest.mark.parametrize(
    ("function", "message"), [(_fail, "this rank must not"), (_die, "rank 1 of 2: the process died"), (_sleep, "no result from ranks")]
)
def test_a_rank_that_fails_dies_or_hangs_is_named_and_none_is_left(function: object, message: str) -> None:
    backend = "gloo" if function is _fail else ""
    with pytest.raises(RuntimeError, match=message):
        run_ranks(2, function, backend=backend, deadline_s=5.0 if function is _fail else 0.5)  # type: ignore[arg-type]
    assert not multiprocessing.active_children()


def test_answers_come_in_the_order_of_ranks() -> None:
    assert run_ranks(3, _number, 7, backend="") == [0, 7, 14]


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="got -1"):
        calibrate(-1, "cpu")
    monkeypatch.setattr(planner_calibrate.device, "choose", lambda kind: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    with pytest.raises(ValueError, match="1 to 4, one for each cuda device, got 8"):
        calibrate(8, "cuda")


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    monkeypatch.setattr(planner_calibrate, "run_ranks", lambda *_, **__: [found(rates())])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    machine = calibrate(3, "cpu", report=messages.append)
    assert "load of 99.0" in machine.notes and machine.ranks_per_core == 1.5
    assert any("when it is idle" in line for line in messages)


def test_ranks_that_take_turns_count_their_processor_time_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", lambda: 5.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    monkeypatch.setattr(reference, "waited_s", lambda: 3.0)
    assert TimingBudget().now() == 4.0 and TimingBudget(by_cpu_time=True).now() == 5.0
    assert TimingBudget(ranks_per_core=2.0).now() == 10.0 and TimingBudget(by_wall=True).now() == 7.0


@pytest.mark.parametrize(
    ("work_s", "message_s", "wanted"), [(0.001, 0.004, 0.004), (0.001, 0.0, microbenchmarks.SHORTEST_S)]
)
def test_what_ranks_do_ahead_of_a_message_is_not_in_its_time(
    work_s: float, message_s: float, wanted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def lasting(seconds: float) -> Callable[[], None]:
        return lambda: clock.__setitem__(0, clock[0] + seconds)

    monkeypatch.setattr(microbenchmarks, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(microbenchmarks, "_work", lambda rank: lasting(work_s))
    rank: Any = Rank(0, 1, "cpu", "", 1)
    assert microbenchmarks._message_seconds(rank, lasting(message_s), 0.05, STEADY) == pytest.approx(wanted, rel=1e-6)
    slow = microbenchmarks._message_seconds(rank, lasting(message_s), 0.05, at_scale(0.5))
    assert slow == pytest.approx(max(wanted / 2, microbenchmarks.SHORTEST_S), rel=1e-6)


def test_what_other_programs_took_is_no_time_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0])
    monkeypatch.setattr(microbenchmarks, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found = microbenchmarks._spent(Rank(0, 1, "cpu", "", 1), lambda: None, 1, at_scale(1.0, lost=0.3))
    assert found == pytest.approx(0.7)


def test_only_ranks_on_a_cpu_work_ahead_of_a_message() -> None:
    assert microbenchmarks._work(SimpleNamespace(kind="cpu"))().shape == (512, 512)
    assert microbenchmarks._work(SimpleNamespace(kind="cuda"))() is None

"""Measure this machine for the planner, on all ranks simultaneously, in about half a minute.

    python tools/plan.py --calibrate machine.json

On a CPU, ranks share cores, caches and memory, so the rate of a single rank is not representative. All ranks measure at
the same time, with the cores divided among them, and the rate of the slowest rank is used. ``devices_per_node`` is then
the number of ranks, and the result is only valid for this number. Links between nodes are not measured: ``inter`` is a
copy of the link within the node, as the machine's notes state.
"""

from __future__ import annotations

import functools
import os
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from megatron import device
from megatron.costs.memory import peak_flops
from megatron.planner.layer_benchmarks import LayerTimings, slowest_timings, time_layers, with_layer_timings
from megatron.planner.machine import Link, Machine
from megatron.planner.microbenchmarks import (
    MESSAGE_BYTES,
    ROUND_S,
    Rates,
    TimingBudget,
    measure_host_update_rate,
    measure_link,
    measure_rates,
    measure_scaled_link,
)
from megatron.planner.reference import Reference
from megatron.planner.spawn_ranks import Rank, Report, run_ranks

DEADLINE_S = 300.0
BUSY_LOAD = 0.5
"""Load per core above which the machine counts as busy."""


@dataclass(frozen=True)
class MeasuredMachine:
    """One rank's measurements; ``link`` is None with a single rank.

    Args:
        reserved: bytes that training cannot use.
        readings: reference readings; all measurements are scaled to the speed of the first one. Empty on GPUs.
    """

    rates: Rates
    link: Link | None
    memory: int
    reserved: int
    host_update: float
    name: str
    layer_timings: tuple[LayerTimings, ...] = ()
    readings: tuple[float, ...] = ()


def calibrate(
    ranks: int = 0,
    device_type: str = "auto",
    *,
    report: Report = lambda text: None,
    timing_budget: TimingBudget = TimingBudget(),  # noqa: B008 - frozen
    message_bytes: Sequence[int] = MESSAGE_BYTES,
    round_s: float = ROUND_S,
    threads: int | None = None,
) -> Machine:
    """Measure this machine with ``ranks`` simultaneous processes, which end before this function returns.

    Args:
        ranks: number of processes; 0 starts one per device, or on a CPU one per core.
        device_type: device type, as for ``--device``.
        report: called with progress messages.
        timing_budget: limits of the measurements.
        message_bytes: sizes of the messages in bytes.
        round_s: seconds per round of messages.
        threads: threads per rank on a CPU; None divides the cores among the ranks.

    Raises:
        ValueError: there are fewer devices, or none of this type.
        RuntimeError: a rank failed.
    """
    device_type = device.choose(device_type)
    num_devices = device.num_devices(device_type)
    ranks = ranks or num_devices
    if ranks < 1 or (device_type != "cpu" and ranks > num_devices):
        raise ValueError(
            f"--ranks must be between 1 and {num_devices}, the number of {device_type} devices, got {ranks}"
        )
    start, load = time.monotonic(), os.getloadavg()[0]
    report(f"measuring with {ranks} ranks on {device_type}, which takes about half a minute")
    if load > BUSY_LOAD * len(os.sched_getaffinity(0)):
        report(f"other programs use this machine (load {load:.1f}): rates will be too low. Calibrate when it is idle")
    timing_budget = (
        timing_budget.shared_by(ranks, threads or 1)
        if device_type == "cpu"
        else replace(timing_budget, use_wall_clock=True)
    )
    backend = device.backend(device_type) if ranks > 1 else ""
    run = functools.partial(run_ranks, deadline_s=DEADLINE_S, report=report, threads=threads)
    measured: list[MeasuredMachine] = run(
        ranks,
        _measure,
        dtypes_of(device_type),
        timing_budget,
        tuple(message_bytes),
        round_s,
        device_type=device_type,
        backend=backend,
    )
    link = measured[0].link
    if link is None:  # measure the link with two processes on the host instead
        link = run(2, measure_scaled_link, tuple(message_bytes), round_s)[0]
    machine = replace(combine(measured, link, device_type, load), ranks_per_core=timing_budget.ranks_per_core)
    if measured[0].link is None:
        machine = replace(machine, intra=link, inter=link)  # the link was already scaled to its own median speed
    report(f"measured in {time.monotonic() - start:.0f} s")
    return machine


def dtypes_of(device_type: str) -> tuple[str, ...]:
    """Return the dtypes for matmul measurements, starting with the default dtype of runs."""
    first = device.default_precision(device_type)
    return (
        first,
        *(dtype for dtype in ("fp32", "bf16", "fp16") if dtype != first and _supports_dtype(device_type, dtype)),
    )


def combine(measurements: Sequence[MeasuredMachine], link: Link, device_type: str, load: float = 0.0) -> Machine:
    """Combine all ranks' simultaneous measurements into a machine, with the slowest rank's rates.

    Args:
        load: machine load before the measurement, for the notes.
    """
    rates, ranks = [entry.rates for entry in measurements], len(measurements)
    products = {dtype: _lowest_rates([entry.products[dtype] for entry in rates]) for dtype in sorted(rates[0].products)}
    peak_from_sheet = peak_flops(measurements[0].name) if device_type != "cpu" else None
    peaks = {dtype: max(rate for _, rate in table) for dtype, table in products.items() if dtype != "fp8"}
    if peak_from_sheet is not None:
        peaks |= {dtype: peak_from_sheet for dtype in ("bf16", "fp16") if dtype in peaks}
    machine = Machine(
        name=f"{measurements[0].name}, {ranks} at once",
        memory_bytes=min(entry.memory for entry in measurements),
        devices_per_node=ranks,
        peak_flops=peaks,
        product_flops=products,
        memory_bandwidth=min(entry.stream for entry in rates),
        update_bandwidth=min(entry.update for entry in rates),
        overhead_s=max(entry.overhead_s for entry in rates),
        intra=link,
        inter=link,
        host_bandwidth=min(entry.copy for entry in rates),
        host_update_bandwidth=min(entry.host_update for entry in measurements),
        reserved_bytes=max(entry.reserved for entry in measurements),
        is_cpu=device_type == "cpu",
        notes=" ".join(_notes(ranks, load, peak_from_sheet is not None)),
    )
    machine = with_layer_timings(machine, slowest_timings([entry.layer_timings for entry in measurements]))
    return scale_to_median_speed(machine, measurements[0].readings)


def scale_to_median_speed(machine: Machine, readings: Sequence[float]) -> Machine:
    """Scale ``machine`` from the first reference reading to the median reading."""
    if not readings:
        return machine
    return replace(machine, reference_s=readings[0]).slowed(statistics.median(readings) / readings[0])


def _notes(ranks: int, load: float, has_data_sheet: bool) -> Iterator[str]:
    ranks_text = f"{ranks} simultaneous ranks" if ranks > 1 else "1 rank"
    yield f"Measured on {os.uname().nodename}, load {load:.1f}, torch {torch.__version__}, {ranks_text}."
    if ranks == 1:
        yield "The link was measured between two processes on this host over gloo, because there was only one rank."
    yield "Links between nodes were not measured: inter is a copy of intra. Edit it before planning for several nodes."
    if not has_data_sheet:
        yield "peak_flops is the rate of the fastest matmuls."


def _measure(
    rank: Rank, dtypes: tuple[str, ...], timing_budget: TimingBudget, message_bytes: Sequence[int], round_s: float
) -> MeasuredMachine:
    """Measure this rank while all other ranks measure. Collective."""
    if rank.device_type == "cpu":
        device.keep_freed_memory()  # as training does
    reference = Reference(rank, timing_budget.now)
    link = measure_link(rank, reference, message_bytes, round_s) if rank.size > 1 else None
    layer_timings = time_layers(rank, dtypes, timing_budget, reference)
    rates = measure_rates(rank, dtypes, timing_budget, reference)
    host_update = rates.update if rank.device_type == "cpu" else measure_host_update_rate(timing_budget)
    readings = tuple(reference.readings) if rank.device_type == "cpu" else ()
    return MeasuredMachine(
        rates, link, *_rank_memory(rank), host_update, device.name(rank.device_type), tuple(layer_timings), readings
    )


def _rank_memory(rank: Rank) -> tuple[int, int]:
    """Return this rank's memory and the part that training cannot use, in bytes.

    On a CPU, the node's memory is divided among the ranks. The unusable part is the resident size of this process at
    startup (Python and libraries). On other devices, it is the memory used by the driver, the communication library and
    other programs.
    """
    total = device.total_memory_bytes(rank.device_type)
    if rank.device_type == "cpu":
        return total // rank.size, _LIBRARY_BYTES
    return total, device.memory_of_others(rank.device_type)


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_LIBRARY_BYTES = _resident_bytes()


def _lowest_rates(tables: Sequence[tuple[tuple[float, float], ...]]) -> tuple[tuple[float, float], ...]:
    """Return ((side, lowest rate), ...) for the sides that all ranks measured."""
    return tuple((rows[0][0], min(rate for _, rate in rows)) for rows in zip(*tables, strict=False))


def _supports_dtype(device_type: str, dtype: str) -> bool:
    if device_type == "cpu":
        return dtype != "fp16"  # training rejects it on CPUs
    return device.missing_dtype(device_type, dtype) is None

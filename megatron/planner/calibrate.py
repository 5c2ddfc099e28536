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
from megatron.planner.layer_benchmarks import LayerTimings, slowest, timed, with_pieces
from megatron.planner.machine import Link, Machine
from megatron.planner.microbenchmarks import (
    ROUND_S,
    SIZES,
    Rates,
    TimingBudget,
    link_alone,
    link_of,
    rates_of,
    update_rate_of_host,
)
from megatron.planner.reference import Reference
from megatron.planner.spawn_ranks import Rank, Report, run_ranks

DEADLINE_S = 300.0
BUSY = 0.5
"""Load per core above which the machine counts as busy."""


@dataclass(frozen=True)
class MeasuredMachine:
    """Measurements of one rank; ``link`` is None with a single rank.

    Args:
        reserved: bytes that training cannot use.
        readings: readings of the reference; all measurements are scaled to the speed of the first one. Empty on GPUs.
    """

    rates: Rates
    link: Link | None
    memory: int
    reserved: int
    host_update: float
    name: str
    models: tuple[LayerTimings, ...] = ()
    readings: tuple[float, ...] = ()


def calibrate(
    ranks: int = 0,
    kind: str = "auto",
    *,
    report: Report = lambda text: None,
    pace: TimingBudget = TimingBudget(),  # noqa: B008 - frozen
    sizes: Sequence[int] = SIZES,
    round_s: float = ROUND_S,
    threads: int | None = None,
) -> Machine:
    """Measure this machine with ``ranks`` simultaneous processes, which end before this function returns.

    Args:
        ranks: number of processes; 0 starts one per device, or on a CPU one per core.
        kind: device type, as for ``--device``.
        report: called with progress messages.
        pace: limits of the measurements.
        sizes: sizes of the messages in bytes.
        round_s: seconds per round of messages.
        threads: threads of each rank on a CPU; None divides the cores among the ranks.

    Raises:
        ValueError: there are fewer devices, or none of this type.
        RuntimeError: a rank failed.
    """
    kind = device.choose(kind)
    num_devices = device.count(kind)
    ranks = ranks or num_devices
    if ranks < 1 or (kind != "cpu" and ranks > num_devices):
        raise ValueError(
            f"--ranks must be between 1 and {num_devices}, the number of {kind} devices, got {ranks}"
        )
    began, load = time.monotonic(), os.getloadavg()[0]
    report(f"measuring with {ranks} ranks on {kind}, which takes about half a minute")
    if load > BUSY * len(os.sched_getaffinity(0)):
        report(f"other programs use this machine (load {load:.1f}): rates will be too low. Calibrate when it is idle")
    pace = pace.shared_by(ranks, threads or 1) if kind == "cpu" else replace(pace, by_wall=True)
    backend = device.backend(kind) if ranks > 1 else ""
    run = functools.partial(run_ranks, deadline_s=DEADLINE_S, report=report, threads=threads)
    measured: list[MeasuredMachine] = run(
        ranks, _measure, dtypes_of(kind), pace, tuple(sizes), round_s, kind=kind, backend=backend
    )
    link = measured[0].link
    if link is None:  # measure the link with two processes on the host instead
        link = run(2, link_alone, tuple(sizes), round_s)[0]
    machine = replace(joined(measured, link, kind, load), ranks_per_core=pace.ranks_per_core)
    if measured[0].link is None:
        machine = replace(machine, intra=link, inter=link)  # the link was already scaled to its own median speed
    report(f"measured in {time.monotonic() - began:.0f} s")
    return machine


def dtypes_of(kind: str) -> tuple[str, ...]:
    """Return the number formats in which matmuls are measured, the default format of runs first."""
    first = device.default_precision(kind)
    return (first, *(dtype for dtype in ("fp32", "bf16", "fp16") if dtype != first and _can(kind, dtype)))


def joined(found: Sequence[MeasuredMachine], link: Link, kind: str, load: float = 0.0) -> Machine:
    """Combine the simultaneous measurements of all ranks into a machine, with the rates of the slowest rank.

    Args:
        load: load of the machine before the measurement, for the notes.
    """
    rates, ranks = [entry.rates for entry in found], len(found)
    products = {dtype: _slowest_of([entry.products[dtype] for entry in rates]) for dtype in sorted(rates[0].products)}
    sheet = peak_flops(found[0].name) if kind != "cpu" else None
    peaks = {dtype: max(rate for _, rate in table) for dtype, table in products.items()}
    if sheet is not None:
        peaks |= {dtype: sheet for dtype in ("bf16", "fp16") if dtype in peaks}
    machine = Machine(
        name=f"{found[0].name}, {ranks} at once",
        memory_bytes=min(entry.memory for entry in found),
        devices_per_node=ranks,
        peak_flops=peaks,
        product_flops=products,
        memory_bandwidth=min(entry.stream for entry in rates),
        update_bandwidth=min(entry.update for entry in rates),
        overhead_s=max(entry.overhead_s for entry in rates),
        intra=link,
        inter=link,
        host_bandwidth=min(entry.copy for entry in rates),
        host_update_bandwidth=min(entry.host_update for entry in found),
        reserved_bytes=max(entry.reserved for entry in found),
        is_cpu=kind == "cpu",
        notes=" ".join(_notes(ranks, load, sheet is not None)),
    )
    machine = with_pieces(machine, slowest([entry.models for entry in found]))
    return at_usual_speed(machine, found[0].readings)


def at_usual_speed(machine: Machine, readings: Sequence[float]) -> Machine:
    """Scale ``machine`` from the speed of the first reading of the reference to the speed of the median reading."""
    if not readings:
        return machine
    return replace(machine, reference_s=readings[0]).slowed(statistics.median(readings) / readings[0])


def _notes(ranks: int, load: float, has_sheet: bool) -> Iterator[str]:
    yield f"Measured on {os.uname().nodename}, load {load:.1f}, torch {torch.__version__}, {ranks} simultaneous ranks."
    if ranks == 1:
        yield "The link was measured between two processes on this host over gloo, because there was only one rank."
    yield "Links between nodes were not measured: inter is a copy of intra. Edit it before planning for several nodes."
    if not has_sheet:
        yield "peak_flops is the rate of the fastest matmuls."


def _measure(
    rank: Rank, dtypes: tuple[str, ...], pace: TimingBudget, sizes: Sequence[int], round_s: float
) -> MeasuredMachine:
    """Return the measurements of this rank, made while all other ranks measure. Collective."""
    if rank.kind == "cpu":
        device.keep_freed_memory()  # as training does
    reference = Reference(rank, pace.now)
    link = link_of(rank, reference, sizes, round_s) if rank.size > 1 else None
    models = timed(rank, dtypes, pace, reference)
    rates = rates_of(rank, dtypes, pace, reference)
    host_update = rates.update if rank.kind == "cpu" else update_rate_of_host(pace)
    readings = tuple(reference.readings) if rank.kind == "cpu" else ()
    return MeasuredMachine(rates, link, *_memory(rank), host_update, device.name(rank.kind), tuple(models), readings)


def _memory(rank: Rank) -> tuple[int, int]:
    """Return (memory of this rank, part of it that training cannot use), in bytes.

    On a CPU, the memory of the node is divided among the ranks. The unusable part is the resident size of this process
    at its start (Python and its libraries). On other devices, it is the memory used by the driver, the communication
    library and other programs.
    """
    total = device.total_memory_bytes(rank.kind)
    if rank.kind == "cpu":
        return total // rank.size, _LIBRARIES
    return total, device.memory_of_others(rank.kind)


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_LIBRARIES = _resident()


def _slowest_of(tables: Sequence[tuple[tuple[float, float], ...]]) -> tuple[tuple[float, float], ...]:
    """Return ((side, lowest rate over the ranks), ...) for the sides that all ranks measured."""
    return tuple((rows[0][0], min(rate for _, rate in rows)) for rows in zip(*tables, strict=False))


def _can(kind: str, dtype: str) -> bool:
    if kind == "cpu":
        return dtype != "fp16"  # training rejects it on CPUs
    return device.missing_dtype(kind, dtype) is None

"""This machine as the planner knows machines: measured in about half a minute, by as many ranks as will work at once.

    python tools/plan.py --calibrate machine.json

On a CPU ranks share cores, caches and memory, so a rate of one rank alone says little: all ranks measure at the same
time, with the cores shared out among them, and the slowest counts. ``devices_per_node`` is then their number, and what
is said holds for that many. Between nodes nothing can be measured here: ``inter`` is the link of the node, and the
machine's notes say so.
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
"""Load of a core from which the machine counts as busy."""


@dataclass(frozen=True)
class MeasuredMachine:
    """What one rank measured; no link where there is no other rank.

    Args:
        reserved: bytes that training cannot have.
        readings: of the reference, whose first has the speed of all that was measured; none on GPUs.
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
    """Return this machine as ``ranks`` processes at once find it. No process and no file is left.

    Args:
        ranks: 0: one for each device, on a CPU one for each core.
        kind: of the device, as ``--device`` takes it.
        report: hears what is being measured.
        pace, sizes, round_s: how long to look and at what; the messages' sizes in bytes.
        threads: of each rank on a CPU; None: the cores shared out.

    Raises:
        ValueError: there are not so many devices, or none of this kind.
        RuntimeError: a rank failed.
    """
    kind = device.choose(kind)
    there = device.count(kind)
    ranks = ranks or there
    if ranks < 1 or (kind != "cpu" and ranks > there):
        raise ValueError(f"the ranks that calibrate must be 1 to {there}, one for each {kind} device, got {ranks}")
    began, load = time.monotonic(), os.getloadavg()[0]
    report(f"{ranks} ranks on {kind}, about half a minute")
    if load > BUSY * len(os.sched_getaffinity(0)):
        report(f"the machine has other work (load {load:.1f}): rates will be too low; calibrate when it is idle")
    pace = pace.shared_by(ranks, threads or 1) if kind == "cpu" else replace(pace, by_wall=True)
    backend = device.backend(kind) if ranks > 1 else ""
    run = functools.partial(run_ranks, deadline_s=DEADLINE_S, report=report, threads=threads)
    found: list[MeasuredMachine] = run(
        ranks, _measure, dtypes_of(kind), pace, tuple(sizes), round_s, kind=kind, backend=backend
    )
    link = found[0].link
    if link is None:  # two processes of the host stand in
        link = run(2, link_alone, tuple(sizes), round_s)[0]
    machine = replace(joined(found, link, kind, load), ranks_per_core=pace.ranks_per_core)
    if found[0].link is None:
        machine = replace(machine, intra=link, inter=link)  # it has its own speed
    report(f"measured in {time.monotonic() - began:.0f} s")
    return machine


def dtypes_of(kind: str) -> tuple[str, ...]:
    """Return the formats whose products are measured, first the one that runs take by default."""
    first = device.default_precision(kind)
    return (first, *(dtype for dtype in ("fp32", "bf16", "fp16") if dtype != first and _can(kind, dtype)))


def joined(found: Sequence[MeasuredMachine], link: Link, kind: str, load: float = 0.0) -> Machine:
    """Return the machine of what its ranks measured at once: of each rate the slowest rank's.

    Args:
        load: of the machine ahead of it, for the notes.
    """
    rates, ranks = [each.rates for each in found], len(found)
    products = {dtype: _slowest_of([each.products[dtype] for each in rates]) for dtype in sorted(rates[0].products)}
    sheet = peak_flops(found[0].name) if kind != "cpu" else None
    peaks = {dtype: max(rate for _, rate in table) for dtype, table in products.items()}
    if sheet is not None:
        peaks |= {dtype: sheet for dtype in ("bf16", "fp16") if dtype in peaks}
    machine = Machine(
        name=f"{found[0].name}, {ranks} at once",
        memory_bytes=min(each.memory for each in found),
        devices_per_node=ranks,
        peak_flops=peaks,
        product_flops=products,
        memory_bandwidth=min(each.stream for each in rates),
        update_bandwidth=min(each.update for each in rates),
        overhead_s=max(each.overhead_s for each in rates),
        intra=link,
        inter=link,
        host_bandwidth=min(each.copy for each in rates),
        host_update_bandwidth=min(each.host_update for each in found),
        reserved_bytes=max(each.reserved for each in found),
        is_cpu=kind == "cpu",
        notes=" ".join(_notes(ranks, load, sheet is not None)),
    )
    machine = with_pieces(machine, slowest([each.models for each in found]))
    return at_usual_speed(machine, found[0].readings)


def at_usual_speed(machine: Machine, readings: Sequence[float]) -> Machine:
    """Return ``machine``, which is as fast as in the first reading of the reference, at the speed of the median one."""
    if not readings:
        return machine
    return replace(machine, reference_s=readings[0]).slowed(statistics.median(readings) / readings[0])


def _notes(ranks: int, load: float, has_sheet: bool) -> Iterator[str]:
    yield f"Measured on {os.uname().nodename} under a load of {load:.1f}, torch {torch.__version__}, {ranks} at once."
    if ranks == 1:
        yield "Messages are those of two processes of this host over gloo, for there was one rank."
    yield "Between nodes nothing was measured: inter is intra; edit it before you plan for several nodes."
    if not has_sheet:
        yield "peak_flops is what the fastest products reached."


def _measure(
    rank: Rank, dtypes: tuple[str, ...], pace: TimingBudget, sizes: Sequence[int], round_s: float
) -> MeasuredMachine:
    """Return what this rank finds while the others look too. Collective."""
    if rank.kind == "cpu":
        device.keep_freed_memory()  # as trainings do
    reference = Reference(rank, pace.now)
    link = link_of(rank, reference, sizes, round_s) if rank.size > 1 else None
    models = timed(rank, dtypes, pace, reference)
    rates = rates_of(rank, dtypes, pace, reference)
    host_update = rates.update if rank.kind == "cpu" else update_rate_of_host(pace)
    readings = tuple(reference.readings) if rank.kind == "cpu" else ()
    return MeasuredMachine(rates, link, *_memory(rank), host_update, device.name(rank.kind), tuple(models), readings)


def _memory(rank: Rank) -> tuple[int, int]:
    """Return the bytes of this rank's device, and those that training cannot have.

    On a CPU ranks share the memory of the node; Python and its libraries take what this process held at its start. On
    other devices it is what is in use that no tensor has: of the driver, the communication library and other programs.
    """
    total = device.total_memory_bytes(rank.kind)
    if rank.kind == "cpu":
        return total // rank.size, _LIBRARIES
    return total, device.memory_of_others(rank.kind)


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_LIBRARIES = _resident()


def _slowest_of(tables: Sequence[tuple[tuple[float, float], ...]]) -> tuple[tuple[float, float], ...]:
    """Return the least rate of each side that all ranks measured."""
    return tuple((rows[0][0], min(rate for _, rate in rows)) for rows in zip(*tables, strict=False))


def _can(kind: str, dtype: str) -> bool:
    if kind == "cpu":
        return dtype != "fp16"  # refused for training on every CPU
    return device.missing_dtype(kind, dtype) is None

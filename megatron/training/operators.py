"""Operators and kernels of a profile: sums over ranks, and the table of those that take longest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

WRITTEN = 40


class Operator(NamedTuple):
    """Own time of one operator or kernel, without what it calls, in microseconds."""

    name: str
    calls: int
    host_us: float
    device_us: float


def operators_of(averages: Iterable[Any]) -> list[Operator]:
    """Return the operators of a profile's ``key_averages()``."""
    return [
        Operator(each.key, each.count, each.self_cpu_time_total, getattr(each, "self_device_time_total", 0.0))
        for each in averages
        if not each.key.startswith(("step ", "ProfilerStep"))
    ]


def joined(of_ranks: Iterable[Iterable[Operator]]) -> list[Operator]:
    """Return the sums over ranks by name, the longest first: by time on devices where there is any, else on hosts."""
    sums: dict[str, Operator] = {}
    for name, calls, host_us, device_us in (each for rank in of_ranks for each in rank):
        so_far = sums.get(name, Operator(name, 0, 0.0, 0.0))
        sums[name] = Operator(name, so_far.calls + calls, so_far.host_us + host_us, so_far.device_us + device_us)
    found = list(sums.values())
    has_device = any(each.device_us for each in found)
    return sorted(found, key=lambda each: (-(each.device_us if has_device else each.host_us), each.name))


def table(shown: list[Operator], steps: int, ranks: int, of: list[Operator] | None = None) -> str:
    """Return the operators as text: own milliseconds of a step and rank, their share, and calls.

    Args:
        of: all operators, where ``shown`` are some.
    """
    named: list[tuple[str, Callable[[Operator], float]]] = [("host", lambda each: each.host_us)]
    if any(each.device_us for each in of or shown):
        named.insert(0, ("device", lambda each: each.device_us))
    runs = steps * ranks
    wholes = [sum(map(time, of or shown)) or 1.0 for _, time in named]
    width = max((len(each.name) for each in shown[:WRITTEN]), default=8)
    head = "".join(f"{name + ' ms':>12} {'share':>7}" for name, _ in named)
    lines = [f"{'operator':<{width}}{head} {'calls':>9}", ""]
    for each in shown[:WRITTEN]:
        times = [(time(each), whole) for (_, time), whole in zip(named, wholes, strict=True)]
        cells = "".join(f"{us / 1e3 / runs:>12.3f} {100 * us / whole:>5.1f} %" for us, whole in times)
        lines.append(f"{each.name:<{width}}{cells} {each.calls / runs:>9.1f}")
    lines[1] = "own time of one step of one rank, the mean over all"
    return "\n".join(lines)

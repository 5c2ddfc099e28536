"""Records as columns of numbers, few enough to draw: of many records those where the curves have their extremes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

EXTREMES_OF = ("loss", "grad_norm")
Column = list[float | None]


def thinned(records: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Return at most about ``limit`` records: of each run of them the first, and the extremes of loss and norm."""
    if len(records) <= limit:
        return list(records)
    each = 1 + 2 * len(EXTREMES_OF)
    buckets = max(limit // each, 1)
    kept = {0, len(records) - 1}
    for bucket in range(buckets):
        start, stop = bucket * len(records) // buckets, (bucket + 1) * len(records) // buckets
        kept.add(start)
        for name in EXTREMES_OF:
            values = [(value, i) for i in range(start, stop) if (value := number(records[i].get(name))) is not None]
            kept |= {min(values)[1], max(values)[1]} if values else set()
    return [records[i] for i in sorted(kept)]


def columns(records: Sequence[dict[str, Any]]) -> dict[str, Column]:
    """Return name -> numbers, None where a record has none; values by stage, layer or corpus as "name/inner"."""
    flat = [dict(_flat(record)) for record in records]
    names = dict.fromkeys(name for record in flat for name in record)
    return {name: [record.get(name) for record in flat] for name in names}


def number(value: Any) -> float | None:
    """Return a finite number, to six digits, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def at_step(steps: Sequence[float | None], values: Column, step: float) -> float | None:
    """Return what a column that grows with the steps was at ``step``: on the line between its neighbours."""
    known = [(s, v) for s, v in zip(steps, values, strict=True) if s is not None and v is not None]
    if not known:
        return None
    after = bisect_right(known, step, key=lambda point: point[0])
    if after == 0:
        return known[0][1]
    if after == len(known):
        return known[-1][1]
    (s0, v0), (s1, v1) = known[after - 1 : after + 1]
    return number(v0 + (v1 - v0) * (step - s0) / (s1 - s0))


def _flat(record: dict[str, Any]) -> Iterator[tuple[str, float | None]]:
    for name, value in record.items():
        if name == "time" and isinstance(value, int | float):
            yield name, value  # six digits of it would be years
        elif isinstance(value, dict):
            yield from ((f"{name}/{inner}", number(each)) for inner, each in value.items())
        elif not isinstance(value, str):
            yield name, number(value)

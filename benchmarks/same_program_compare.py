"""What two checkouts produced, compared. Each function returns the differences in words; none: the same."""

from __future__ import annotations

import difflib
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

SHOWN = 20
"""Lines of a difference, or names of a list, that are printed."""
BOOTSTRAP_DRAWS = 10_000


def differing_numbers(what: str, here: Mapping[Any, Any], other: Mapping[Any, Any], within: float = 0.0) -> list[str]:
    """Compare numbers or arrays by name; ``within`` 0: to the bit, else the largest absolute difference allowed."""
    found = differing_names(f"names of {what}", here, other)
    for name in here.keys() & other.keys():
        one, two = np.asarray(here[name]), np.asarray(other[name])
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            found.append(f"{what} {name}: {one.dtype} {one.shape} here, {two.dtype} {two.shape} there")
    worst, where = furthest(here, other)
    if where is not None and not (within and worst <= within):
        found.append(f"{what}: up to {worst:.2e} apart, most at {where}; allowed {within or 'no bit'}")
    return found


def furthest(here: Mapping[Any, Any], other: Mapping[Any, Any]) -> tuple[float, Any]:
    """Return the largest absolute difference and its name; (0, None): those of one form are the same to the bit."""
    worst, where = 0.0, None
    for name in here.keys() & other.keys():
        one, two = np.asarray(here[name]), np.asarray(other[name])
        if (one.shape, one.dtype) == (two.shape, two.dtype) and one.tobytes() != two.tobytes():
            distance = float(np.max(np.abs(one.astype(np.float64) - two.astype(np.float64))))
            if where is None or not distance <= worst:  # NaN is the worst
                worst, where = distance, name
    return worst, where


def differing_names(what: str, here: Iterable[Any], other: Iterable[Any]) -> list[str]:
    """Compare two sets of names, keys, or (file, checksum)."""
    only_here, only_other = set(here) - set(other), set(other) - set(here)
    found = [] if set(other) else [f"{what}: there are none to compare"]
    found += [f"{what}: lost {shown(only_other)}"] if only_other else []
    return found + ([f"{what}: new {shown(only_here)}"] if only_here else [])


def differing_texts(what: str, here: str, other: str) -> list[str]:
    """Compare texts byte for byte; return the lines that were (-) and are (+)."""
    difference = difflib.unified_diff(other.splitlines(), here.splitlines(), lineterm="", n=0)
    lines = [line for line in difference if not line.startswith(("---", "+++", "@@"))]
    if not lines:
        return [] if here == other else [f"{what}: ends of lines differ"]
    more = [f"... {len(lines) - SHOWN} more lines"] if len(lines) > SHOWN else []
    return [f"{what}:", *(f"    {line}" for line in lines[:SHOWN] + more)]


def keys_of(value: Any, place: str = "") -> Iterator[str]:
    """Yield the path of each key in a JSON value; items of a list share one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{place}/{key}"
            yield from keys_of(inner, f"{place}/{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner, f"{place}[]")


def collected_tests(output: str) -> Counter[str]:
    """Return the tests that ``pytest --collect-only -q`` lists: file and test without the folder."""
    files = (line.partition("::") for line in output.splitlines() if ".py::" in line)
    return Counter(f"{path.rpartition('/')[2]}::{test}" for path, _, test in files)


def lost_tests(here: Counter[str], other: Counter[str], reasons: Mapping[str, str]) -> tuple[list[str], str]:
    """Return tests of ``other`` that are neither here nor given a reason, and what else is to be told."""
    lost, new = sorted((other - here).elements()), sorted((here - other).elements())
    gone = {name: reason for name in lost if (reason := reason_of(name, reasons)) is not None}
    now_in = {test: file for file, _, test in (name.partition("::") for name in new)}
    found = [] if other else ["the other checkout has no tests to compare"]
    for name in (name for name in lost if name not in gone):
        elsewhere = now_in.get(name.partition("::")[2])
        found.append(f"lost {name}" + (f" (new in {elsewhere})" if elsewhere else ""))
    counts = f"{other.total()} there, {here.total()} here, {sum(name in gone for name in lost)} gone with a reason"
    listed = [f"    gone {name} -- {reason}" for name, reason in gone.items()] + [f"    new {name}" for name in new]
    return found, "\n".join([counts, *listed])


def read_reasons(text: str) -> dict[str, str]:
    """Read lines ``NAME -- reason``; a NAME that ends with * is the beginning of names.

    Raises:
        ValueError: a line that is no comment has no reason.
    """
    reasons = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, reason = (part.strip() for part in line.partition(" -- "))
            if not name or not reason:
                raise ValueError(f"a reason must be written as NAME -- reason, got {line!r}")
            reasons[name] = reason
    return reasons


def reason_of(name: str, reasons: Mapping[str, str]) -> str | None:
    """Return why ``name`` may differ, or None."""
    fitting = (given for given in reasons if name == given or given.endswith("*") and name.startswith(given[:-1]))
    return next((reasons[given] for given in fitting), None)


def median_interval(ratios: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Return the median and its 95 % bootstrap interval (percentiles of resampled medians)."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(BOOTSTRAP_DRAWS))
    low, high = medians[int(0.025 * BOOTSTRAP_DRAWS)], medians[int(0.975 * BOOTSTRAP_DRAWS) - 1]
    return statistics.median(ratios), low, high


def shown(names: Iterable[Any]) -> str:
    """Return the names in order, cut at a readable number."""
    ordered = sorted(map(str, names))
    return ", ".join(ordered[:SHOWN]) + (f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else "")

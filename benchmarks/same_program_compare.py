"""Comparison of the output of two checkouts. Each function returns the differences as text, or [] if there are none."""

from __future__ import annotations

import difflib
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

MAX_SHOWN = 20
"""Maximum number of printed lines of a difference, or of names in a list."""
BOOTSTRAP_DRAWS = 10_000


def differing_numbers(
    label: str, current: Mapping[Any, Any], other: Mapping[Any, Any], tolerance: float = 0.0
) -> list[str]:
    """Compare numbers or arrays by name: bitwise if ``tolerance`` is 0, otherwise by their largest difference."""
    differences = differing_names(f"names of {label}", current, other)
    for name in current.keys() & other.keys():
        array, other_array = np.asarray(current[name]), np.asarray(other[name])
        if (array.shape, array.dtype) != (other_array.shape, other_array.dtype):
            differences.append(
                f"{label} {name}: {array.dtype} {array.shape} here, {other_array.dtype} {other_array.shape} there"
            )
    largest, name_of_largest = furthest(current, other)
    if name_of_largest is not None and not (tolerance and largest <= tolerance):
        differences.append(
            f"{label}: differ by up to {largest:.2e}, most at {name_of_largest}; allowed {tolerance or 'no difference'}"
        )
    return differences


def furthest(current: Mapping[Any, Any], other: Mapping[Any, Any]) -> tuple[float, Any]:
    """Return the largest absolute difference and its name; (0, None) without a difference.

    Values that differ in shape or dtype are skipped.
    """
    largest, name_of_largest = 0.0, None
    for name in current.keys() & other.keys():
        array, other_array = np.asarray(current[name]), np.asarray(other[name])
        if (array.shape, array.dtype) == (
            other_array.shape,
            other_array.dtype,
        ) and array.tobytes() != other_array.tobytes():
            distance = float(np.max(np.abs(array.astype(np.float64) - other_array.astype(np.float64))))
            if name_of_largest is None or not distance <= largest:  # NaN counts as the largest
                largest, name_of_largest = distance, name
    return largest, name_of_largest


def differing_names(label: str, current: Iterable[Any], other: Iterable[Any]) -> list[str]:
    """Compare two sets, such as names, keys or (file, checksum) pairs."""
    only_current, only_other = set(current) - set(other), set(other) - set(current)
    differences = [] if set(other) else [f"{label}: nothing to compare"]
    differences += [f"{label}: lost {format_names(only_other)}"] if only_other else []
    return differences + ([f"{label}: new {format_names(only_current)}"] if only_current else [])


def differing_texts(label: str, current: str, other: str) -> list[str]:
    """Compare texts byte for byte; return the removed (-) and added (+) lines."""
    difference = difflib.unified_diff(other.splitlines(), current.splitlines(), lineterm="", n=0)
    lines = [line for line in difference if not line.startswith(("---", "+++", "@@"))]
    if not lines:
        return [] if current == other else [f"{label}: line endings differ"]
    more = [f"... {len(lines) - MAX_SHOWN} more lines"] if len(lines) > MAX_SHOWN else []
    return [f"{label}:", *(f"    {line}" for line in lines[:MAX_SHOWN] + more)]


def keys_of(value: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each key in a JSON value; items of a list share one path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{path}/{key}"
            yield from keys_of(inner, f"{path}/{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner, f"{path}[]")


def collected_tests(output: str) -> Counter[str]:
    """Return the tests that ``pytest --collect-only -q`` lists, as file and test without the folder."""
    files = (line.partition("::") for line in output.splitlines() if ".py::" in line)
    return Counter(f"{path.rpartition('/')[2]}::{test}" for path, _, test in files)


def lost_tests(current: Counter[str], other: Counter[str], reasons: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the tests of ``other`` that are missing in ``current`` without a reason, and a summary."""
    lost, new_tests = sorted((other - current).elements()), sorted((current - other).elements())
    explained = {name: reason for name in lost if (reason := reason_of(name, reasons)) is not None}
    new_file_of = {test: file for file, _, test in (name.partition("::") for name in new_tests)}
    losses = [] if other else ["the other checkout has no tests to compare"]
    for name in (name for name in lost if name not in explained):
        new_file = new_file_of.get(name.partition("::")[2])
        losses.append(f"lost {name}" + (f" (new in {new_file})" if new_file else ""))
    counts = (
        f"{other.total()} there, {current.total()} here, {sum(name in explained for name in lost)} removed for a reason"
    )
    listed = [f"    removed {name} -- {reason}" for name, reason in explained.items()] + [
        f"    new {name}" for name in new_tests
    ]
    return losses, "\n".join([counts, *listed])


def read_reasons(text: str) -> dict[str, str]:
    """Parse lines ``NAME -- reason``; a NAME that ends with * is a prefix of names.

    Raises:
        ValueError: a line other than a comment has no reason.
    """
    reasons = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, reason = (field.strip() for field in line.partition(" -- "))
            if not name or not reason:
                raise ValueError(f"a reason must be written as NAME -- reason, got {line!r}")
            reasons[name] = reason
    return reasons


def reason_of(name: str, reasons: Mapping[str, str]) -> str | None:
    """Return the reason in ``reasons`` why ``name`` may differ, or None."""
    matching = (
        pattern for pattern in reasons if name == pattern or pattern.endswith("*") and name.startswith(pattern[:-1])
    )
    return next((reasons[pattern] for pattern in matching), None)


def median_interval(ratios: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Return the median and its 95 % bootstrap interval (percentiles of resampled medians)."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(BOOTSTRAP_DRAWS))
    low, high = medians[int(0.025 * BOOTSTRAP_DRAWS)], medians[int(0.975 * BOOTSTRAP_DRAWS) - 1]
    return statistics.median(ratios), low, high


def format_names(names: Iterable[Any]) -> str:
    """Return the sorted names as text, at most ``MAX_SHOWN`` of them."""
    ordered = sorted(map(str, names))
    return ", ".join(ordered[:MAX_SHOWN]) + (
        f" and {len(ordered) - MAX_SHOWN} more" if len(ordered) > MAX_SHOWN else ""
    )

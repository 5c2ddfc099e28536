"""What lies in a run folder, as far as it can be read: a run may be half written, cut off, or of an older version.

Records become columns of numbers, few enough to draw: of many records those where the curves have their extremes.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.training.callbacks.metrics_writer import EVALUATIONS, METRICS, read_metrics
from megatron.training.callbacks.stability_guard import read_journal

SIGNS = (METRICS, "config.json", EVALUATIONS)


@dataclass(frozen=True)
class RunFolder:
    """One run. What is not there is empty; ``notes`` say what is there and cannot be read."""

    path: Path
    name: str
    records: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    stages: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    journal: list[dict[str, Any]] = field(default_factory=list)
    operators: dict[str, Any] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of one kind: train, valid, test or save."""
        return [record for record in self.records if record["kind"] == kind]

    def setting(self, section: str, name: str) -> Any:
        """Return a setting of the run, None where it is not known."""
        values = self.config.get(section)
        return values.get(name) if isinstance(values, dict) else None


def run_folders(paths: list[Path]) -> list[Path]:
    """Return the run folders that are meant: each path itself, or all within it, in the order of their names.

    Raises:
        ValueError: a path is none and has none; all such paths are told.
    """
    found: list[Path] = []
    problems = []
    for path in paths:
        within = [path] if _is_run(path) else sorted(child for child in path.glob("*") if _is_run(child))
        if not within:
            got = "a folder without one" if path.is_dir() else "no folder"
            problems.append(f"{path} must be a run folder, with {' or '.join(SIGNS)}, or hold some; got {got}")
        found += [folder for folder in within if folder not in found]
    if problems:
        raise ValueError("\n".join(problems))
    return found


def read_run(path: Path, name: str) -> RunFolder:
    """Return what can be read of the run in ``path``."""
    notes: list[str] = []
    records = [each for each in read_metrics(path / METRICS) if _is_record(each)]
    evaluations = [each for each in read_metrics(path / EVALUATIONS) if _is_record(each)]
    if not records and not evaluations:
        notes.append("there is no record yet: the run ended, or has not come, before its first --log-interval")
    return RunFolder(
        path,
        name,
        records=records,
        evaluations=evaluations,
        config=_object(path / "config.json", dict, notes) or _settings(evaluations),
        versions=_object(path / "versions.json", dict, notes),
        stages=_object(path / "stages.json", list, notes),
        starts=[line for line in _lines(path / "starts.jsonl") if _has_step(line)],
        journal=[line for line in _journal(path, notes) if _has_step(line)],
        operators=_object(path / "profile" / "top.json", dict, notes),
        commands=_text(path / "command.txt").splitlines(),
        notes=notes,
    )


def names_of(paths: list[Path]) -> list[str]:
    """Return a name for each run: its folder's, with as much of the path as tells it from the others."""
    absolute = [path.resolve() for path in paths]
    for depth in range(1, max((len(path.parts) for path in absolute), default=1)):
        names = ["/".join(path.parts[-depth:]) for path in absolute]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in absolute]


def _is_run(path: Path) -> bool:
    return any((path / sign).is_file() for sign in SIGNS)


def _is_record(value: Any) -> bool:
    return _has_step(value) and isinstance(value.get("kind"), str)


def _has_step(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("step"), int) and not isinstance(value["step"], bool)


def _object(path: Path, kind: type, notes: list[str]) -> Any:
    if not path.is_file():
        return kind()
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read ({error})")
        return kind()
    if not isinstance(value, kind):
        notes.append(f"{path.name} holds something else than a run writes there")
        return kind()
    return value


def _settings(evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    """Return those of the last evaluation, in a folder that has no run of its own."""
    config = evaluations[-1].get("config") if evaluations else None
    return config if isinstance(config, dict) else {}


def _lines(path: Path) -> list[Any]:
    found = []
    for line in _text(path).splitlines():
        with suppress(ValueError):  # a kill has cut it off
            found.append(json.loads(line))
    return found


def _journal(path: Path, notes: list[str]) -> list[Any]:
    try:
        return [*read_journal(path.resolve() / "stability.jsonl")]
    except (OSError, ValueError) as error:
        notes.append(f"stability.jsonl cannot be read ({error})")
        return []


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


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

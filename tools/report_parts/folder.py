"""What lies in a run folder, as far as it can be read: a run may be half written, cut off, or of an older version."""

from __future__ import annotations

import json
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

"""Machines and runs made up for the judging functions of the GPU program."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.part import Machine
from benchmarks.gpu.train_run import Run


def make_dry_machine(folder: Path, limit_s: float = 900.0, device_type: str = "cpu") -> Machine:
    """Return a machine in the dry form whose commands end after so many seconds."""
    return Machine(device_type, "CPU", True, 1, 2**34, 2, folder, folder, deadline=time.monotonic() + limit_s)


def make_run(losses: Sequence[float], *, steps: Sequence[int] = (), norm: float = 1.0, num_skipped: int = 0) -> Run:
    """Return a run with these losses, by default of steps from 1 on."""
    step_numbers = tuple(steps) or tuple(range(1, len(losses) + 1))
    return Run(Path("run"), step_numbers, tuple(losses), (norm,) * len(losses), num_skipped, 1.0)


def write_metrics(folder: Path, losses: Sequence[float | None]) -> None:
    """Write what a run records of its steps from 1 on."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"kind": "train", "step": step, "loss": loss, "grad_norm": 1.0, "skipped": 0}
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

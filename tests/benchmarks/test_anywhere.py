"""Benchmarks start as their first lines say, from any folder and with nothing set for Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text("utf-8"))
SHORT = ("start_up.py",)


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_a_benchmark_tells_its_flags_from_any_folder(name: str, tmp_path: Path) -> None:
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(FOLDER / name), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_there_are_benchmarks_to_start() -> None:
    assert set(SHORT) < set(PROGRAMS)

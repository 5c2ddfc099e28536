"""Benchmarks start as their first lines say, from any folder and with nothing set for Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text("utf-8"))
FAST_PROGRAMS = ("start_up.py",)


@pytest.mark.parametrize(
    "name", [name if name in FAST_PROGRAMS else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_help_works_from_any_folder(name: str, tmp_path: Path) -> None:
    clean_env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(FOLDER / name), "--help"]
    result = subprocess.run(command, cwd=tmp_path, env=clean_env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout


def test_benchmarks_are_found() -> None:
    assert set(FAST_PROGRAMS) < set(PROGRAMS)

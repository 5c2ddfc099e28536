"""The scripts that run the examples under a real SLURM and a real Open MPI, where they are there and asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {name: Path(__file__).with_name(f"local_{name}.sh") for name in ("slurm", "mpirun")}
SHARED = Path(__file__).with_name("local_runs.sh")
PROGRAMS = {"slurm": ("slurmctld", "slurmd", "munged"), "mpirun": ("mpirun",)}
CANNOT = 77


def lint(script: Path) -> str:
    """Return what bash has against a script, and shellcheck if it is there."""
    found = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True).stderr
    if shutil.which("shellcheck"):
        command = ["shellcheck", "--external-sources", "--severity=warning", str(script)]
        found += subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return found


EXAMPLES = sorted([*(ROOT / "examples" / "launch").glob("*.sh"), *(ROOT / "examples" / "slurm").glob("*.sh")])


@pytest.mark.parametrize("script", [*SCRIPTS.values(), SHARED, *EXAMPLES], ids=lambda path: path.name)
def test_scripts_are_bash(script: Path) -> None:
    assert lint(script) == ""


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_part_of_the_head_is_there_and_is_run(name: str) -> None:
    text = SCRIPTS[name].read_text()
    head, _, code = text.partition("set -euo pipefail")
    named = [line.split()[1] for line in head.splitlines() if line.startswith("#   ") and "  " in line[4:]]
    assert f'local_runs.sh" "{" ".join(named)}" "$@"' in code
    assert all(f"\n{part}() {{\n" in code for part in named)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_part_that_is_not_there_is_refused_ahead_of_any_daemon(name: str, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for program in ("apt-get", "id", *PROGRAMS[name]):
        (programs / program).write_text(f'#!/bin/sh\n[ "$0" = "{programs}/id" ] && echo 0\ntouch "{tmp_path}/$$"\n')
        (programs / program).chmod(0o755)
    env = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    done = subprocess.run(["bash", str(SCRIPTS[name]), "others"], env=env, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and done.stderr == f"local_{name}.sh: no such part: others\n"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_examples_run_under_the_real_program(name: str) -> None:
    """Its small siblings are tests/examples/test_slurm.py and test_examples.py, with programs that take its place."""
    missing = [program for program in PROGRAMS[name] if not shutil.which(program)]
    if missing or (name == "slurm" and os.getuid() != 0):
        why = f"{', '.join(missing)} not on PATH" if missing else "needs root"
        pytest.skip(f"{why}; as root on Debian: bash tests/launch/{SCRIPTS[name].name}")
    env = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(["bash", str(SCRIPTS[name])], env=env, capture_output=True, text=True)
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": well, ") == done.stdout.count("\n== ") / 2

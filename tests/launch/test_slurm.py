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
SHARED_SCRIPT = Path(__file__).with_name("local_runs.sh")
PROGRAMS = {"slurm": ("slurmctld", "slurmd", "munged"), "mpirun": ("mpirun",)}
SKIP_CODE = 77


def lint(script: Path) -> str:
    """Return what bash has against a script, and shellcheck if it is there."""
    messages = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True).stderr
    if shutil.which("shellcheck"):
        command = ["shellcheck", "--external-sources", "--severity=warning", str(script)]
        messages += subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return messages


EXAMPLES = sorted([*(ROOT / "examples" / "launch").glob("*.sh"), *(ROOT / "examples" / "slurm").glob("*.sh")])


@pytest.mark.parametrize("script", [*SCRIPTS.values(), SHARED_SCRIPT, *EXAMPLES], ids=lambda path: path.name)
def test_scripts_pass_lint(script: Path) -> None:
    assert lint(script) == ""


@pytest.mark.parametrize("name", SCRIPTS)
def test_documented_functions_exist_and_run(name: str) -> None:
    text = SCRIPTS[name].read_text()
    header, _, code = text.partition("set -euo pipefail")
    function_names = [line.split()[1] for line in header.splitlines() if line.startswith("#   ") and "  " in line[4:]]
    assert f'local_runs.sh" "{" ".join(function_names)}" "$@"' in code
    assert all(f"\n{function_name}() {{\n" in code for function_name in function_names)


@pytest.mark.parametrize("name", SCRIPTS)
def test_unknown_function_raises_before_daemons_start(name: str, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for program in ("apt-get", "id", *PROGRAMS[name]):
        (programs / program).write_text(f'#!/bin/sh\n[ "$0" = "{programs}/id" ] && echo 0\ntouch "{tmp_path}/$$"\n')
        (programs / program).chmod(0o755)
    env = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    result = subprocess.run(["bash", str(SCRIPTS[name]), "others"], env=env, capture_output=True, text=True, timeout=20)
    assert result.returncode == 2 and result.stderr.startswith(f"local_{name}.sh: unknown part: others. Use one of: ")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SCRIPTS)
def test_examples_run_under_real_scheduler(name: str) -> None:
    """Its small siblings are tests/examples/test_slurm.py and test_examples.py, with programs that take its place."""
    missing = [program for program in PROGRAMS[name] if not shutil.which(program)]
    if missing or (name == "slurm" and os.getuid() != 0):
        reason = f"{', '.join(missing)} not on PATH" if missing else "needs root"
        pytest.skip(f"{reason}; as root on Debian: bash tests/launch/{SCRIPTS[name].name}")
    env = os.environ | {"PYTHON": sys.executable}
    result = subprocess.run(["bash", str(SCRIPTS[name])], env=env, capture_output=True, text=True)
    if result.returncode == SKIP_CODE:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(": passed, ") == result.stdout.count("\n== ") / 2

"""rehearse.sh: steps run with the given Python in a copy without .git, and a failed step ends in exit code 1."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu.part import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu" / "rehearse.sh"
STUB = """#!/usr/bin/env bash
case "$*" in
  *pytest*) echo "tests in $PWD: $*"; [ -e .git ] && echo "in a repository"; [[ "$*" != *torch_compat* ]] ;;
  *importlib.util*) exit 0 ;;
  *) echo "Python 3.12.1, torch 2.11.0+cu130" ;;
esac
"""
"""Python of the environment: tests of torch_compat fail."""


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the script copies the files that git lists")
def test_steps_run_in_copy_and_failure_is_reported(tmp_path: Path) -> None:
    (packages,) = re.findall(r"packages=\((.*?)\)", SCRIPT.read_text(), re.DOTALL)
    stub = tmp_path / "venv" / "bin" / "python"
    stub.parent.mkdir(parents=True)
    stub.write_text(STUB)
    stub.chmod(0o755)
    (tmp_path / "venv" / ".stamp").write_text(" ".join(shlex.split(packages)) + "\n")
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "deepspeed-0-py3-none-any.whl").touch()
    result = subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path), "contract", "torch_compat", "other"],
        cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    rows = {line.split()[0]: line.split(" s  ")[1] for line in result.stdout.splitlines()[-3:]}
    assert rows == {"contract": "passed", "torch_compat": "failed, code 1", "other": "failed, code 2"}
    log = (tmp_path / "logs" / "contract.log").read_text()
    assert f"tests in {tmp_path / 'tree'}: -m pytest" in log and "in a repository" not in log
    assert (tmp_path / "tree" / "benchmarks" / "gpu" / "first.sh").exists()
    assert "must be A, B, contract" in (tmp_path / "logs" / "other.log").read_text()

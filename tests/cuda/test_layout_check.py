"""The layout check of a run on CUDA computes on the CPU and leaves no process behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.proof.check_result import OK, CheckResult
from tests.cuda import fake_cuda

ROOT = Path(__file__).resolve().parents[2]


def test_check_of_a_run_on_cuda_uses_no_device() -> None:
    if fake_cuda.find_compiler() is None:
        pytest.skip("no C++ compiler: the simulated device cannot be built")
    environment = {
        **os.environ, "DS_ACCELERATOR": "cuda", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.cuda.layout_check", "--model-parallel-size", "2", "--bf16"]
    process = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert process.returncode == 0, process.stderr
    device_type, num_children, content = json.loads(process.stdout.splitlines()[-1])
    result = CheckResult.from_dict(content)
    assert device_type == "cuda" and num_children == 0
    assert result.state == OK and 0 < result.gradient < 1e-14, result.line()
    assert "cuda kernels (flash attention, Triton)" in result.line()

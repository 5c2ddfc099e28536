"""The tests of this folder without a GPU: on the simulated device and on the CPU, so that they cannot rot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.checks import PytestReport, read_report

ROOT = Path(__file__).resolve().parents[2]
QUICK = (
    "test_attention.py::test_path_matches_formula[documents-61-fp32]",
    "test_attention.py::test_cudnn_is_disabled_only_for_masks",
    "test_attention.py::test_distance_bias_and_its_gradient_match_formula[causal-61-fp32]",
    "test_dropout.py::test_layout_independent_masks_are_bitwise_cpu_masks",
    "test_dropout.py::test_recompute_draws_forward_dropout_masks[gpt2-{'recompute_attention': True}]",
    "test_families.py::test_loss_and_gradients_match_cpu[gpt2-documents-fp32]",
    "test_families.py::test_loss_and_gradients_match_cpu[llama-chunked loss-fp32]",
    "test_families.py::test_loss_and_gradients_match_cpu[t5-documents-fp32]",
    "test_families.py::test_host_batch_is_rejected_on_other_device",
    "test_memory.py::test_recompute_inputs_are_stored_where_requested",
    "test_ops.py::test_norms_match_formulas[rms norm-61-fp32]",
    "test_ops.py::test_label_outside_vocabulary_raises_or_makes_loss_nan",
    "test_optimizer.py::test_main_params_match_cpu_updates[adamw-bf16]",
)


def run_on_device(device_type: str, tests: tuple[str, ...], folder: Path, *pytest_args: str) -> PytestReport:
    """Return what pytest finds of tests of this folder on a device of this kind, in a process of its own.

    The simulated device must be made ready ahead of the first backward of a process.
    """
    report = folder / f"{device_type}.xml"
    argv = [
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        f"--gpu-device={device_type}",
        f"--junitxml={report}",
        *pytest_args,
    ]
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *argv, *(f"tests/gpu/{test}" for test in tests)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.exists(), result.stdout[-2000:] + result.stderr[-2000:]
    return read_report(report)


@pytest.mark.timeout(300)
def test_quick_gpu_tests_pass_on_simulated_device(tmp_path: Path) -> None:
    """The same code as on a GPU, for every choice that looks for the CPU; and no mix of host and device."""
    report = run_on_device("sim", QUICK, tmp_path)
    assert report.failed == {} and report.passed == len(QUICK), report.text


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("device_type", ["cpu", "sim"])
def test_all_gpu_tests_pass_without_gpu(device_type: str, tmp_path: Path) -> None:
    """On the simulated device a third of the files a day."""
    files = sorted(path.name for path in Path(__file__).parent.glob("test_*.py"))
    if device_type == "sim":
        files = files[int(os.environ["TEST_DAY"]) % 3 :: 3]
    report = run_on_device(
        device_type, tuple(files), tmp_path, "-m", "gpu", *(["--all"] if device_type == "cpu" else [])
    )
    min_passed, max_skipped = {"cpu": (500, 40), "sim": (10, 80)}[device_type]  # sim keeps documents apart by a mask
    assert report.failed == {} and report.passed > min_passed, report.text
    assert sum(report.skipped.values()) < max_skipped, report.text


def test_gpu_tests_require_gpu_for_cuda_option(
    pytestconfig: pytest.Config,
) -> None:
    import torch

    from tests import conftest

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytestconfig.option, "gpu_device", "cuda")
        with pytest.raises(pytest.UsageError, match="--gpu-device cuda needs a GPU"):
            conftest.pytest_configure(pytestconfig)

"""The tests of this folder without a GPU: on the simulated device and on the CPU, so that they cannot rot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.checks import Report, read_report

ROOT = Path(__file__).resolve().parents[2]
QUICK = (
    "test_attention.py::test_a_path_is_the_formula[documents-61-fp32]",
    "test_attention.py::test_a_mask_is_kept_from_cudnn",
    "test_attention.py::test_a_bias_by_distance_is_the_formula_with_its_own_gradient[causal-61-fp32]",
    "test_dropout.py::test_masks_of_any_layout_are_the_cpus_to_the_bit",
    "test_dropout.py::test_what_is_recomputed_drops_what_the_forward_dropped[gpt2-{'recompute_attention': True}]",
    "test_families.py::test_loss_and_every_gradient_are_those_of_the_cpu[gpt2-documents-fp32]",
    "test_families.py::test_loss_and_every_gradient_are_those_of_the_cpu[llama-chunked loss-fp32]",
    "test_families.py::test_loss_and_every_gradient_are_those_of_the_cpu[t5-documents-fp32]",
    "test_families.py::test_a_batch_on_the_host_is_refused_where_the_device_is_another",
    "test_memory.py::test_inputs_of_recomputed_layers_wait_where_they_are_asked_to",
    "test_ops.py::test_norms_are_their_formulas[rms norm-61-fp32]",
    "test_ops.py::test_a_label_outside_the_vocabulary_is_told_or_makes_the_loss_no_number",
    "test_optimizer.py::test_masters_move_as_on_the_cpu[adamw-bf16]",
)


def in_place_of_a_gpu(kind: str, tests: tuple[str, ...], folder: Path, *words: str) -> Report:
    """Return what pytest finds of tests of this folder on a device of this kind, in a process of its own.

    The simulated device must be made ready ahead of the first backward of a process.
    """
    report = folder / f"{kind}.xml"
    asked = ["-p", "no:xdist", "-p", "no:cacheprovider", f"--gpu-device={kind}", f"--junitxml={report}", *words]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *asked, *(f"tests/gpu/{test}" for test in tests)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return read_report(report)


@pytest.mark.timeout(300)
def test_some_of_them_pass_on_the_simulated_device(tmp_path: Path) -> None:
    """The same code as on a GPU, for every choice that looks for the CPU; and no mix of host and device."""
    report = in_place_of_a_gpu("sim", QUICK, tmp_path)
    assert report.failed == {} and report.passed == len(QUICK), report.text


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_all_of_them_pass_in_the_place_of_a_gpu(kind: str, tmp_path: Path) -> None:
    """On the simulated device a third of the files a day."""
    files = sorted(path.name for path in Path(__file__).parent.glob("test_*.py"))
    if kind == "sim":
        files = files[int(os.environ["TEST_LAYOUT_THIRD"]) :: 3]
    report = in_place_of_a_gpu(kind, tuple(files), tmp_path, "-m", "gpu", *(["--all"] if kind == "cpu" else []))
    fewest, most_skipped = {"cpu": (500, 40), "sim": (10, 80)}[kind]  # sim keeps documents apart by a mask
    assert report.failed == {} and report.passed > fewest, report.text
    assert sum(report.skipped.values()) < most_skipped, report.text


def test_without_the_option_and_without_a_gpu_they_are_skipped_and_asking_for_cuda_is_an_error(
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

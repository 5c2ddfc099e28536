"""The example of a plug-in, a device simulated in Python, goes through what a real one would: no number is another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.inspect import tensor_differences
from megatron.checkpoint.one_process import open_folder
from tests.examples.accelerator_sim import PLUGIN, ROOT

STEPS = "--train-iters 3 --gas 1 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0"
HOST_FLAGS = "--distributed-backend gloo"
HOST_COPY_WARNING = "sim tensors are copied through the host and sent by gloo (host_copies): slow, for tests of results"
CHECK_NAMES = (
    "answers copies views in_place formats layers optimizer generators modules deepspeed collectives reversible"
)


def run_in_process(folder: Path, *runs: str, **environment: str) -> dict[str, Any]:
    """Train ``runs`` in a fresh process and return what it wrote down; each run's code must be 0."""
    paths = os.pathsep.join([str(ROOT), str(PLUGIN), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    process = subprocess.run(
        [sys.executable, "-m", "tests.examples.accelerator_sim", str(folder), *runs],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    result = json.loads((folder / "result.json").read_text())
    for name, codes in result["codes"].items():
        assert not any(codes), (folder / f"{name}.log").read_text()
    return result


def read_losses_and_norms(folder: Path) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of every step."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(record["loss"], record["grad_norm"]) for record in records if record["kind"] == "train"]


def assert_runs_equal(folder: Path, first: str, second: str, steps: int = 3) -> None:
    """Check that two runs have the losses, gradient norms, weights and moments of one another, bit for bit."""
    assert read_losses_and_norms(folder / first) == read_losses_and_norms(folder / second)
    assert len(read_losses_and_norms(folder / first)) in (steps, steps - 3), (
        "a run that goes on takes the steps that are left"
    )
    last = [open_folder(folder / name / "checkpoints" / f"step-{steps:08d}") for name in (first, second)]
    differences = [row for row in tensor_differences(*last) if not row.name.startswith("rng/")]
    assert any(name.startswith("optimizer/exp_avg/") for name in last[0].names()) and not differences


def test_tensor_parallel_gpt2_equals_cpu(tmp_path: Path) -> None:
    """In bf16, since attention in fp32 on a CPU does not use torch's kernel; with the device's own collectives."""
    flags = f"{STEPS} --model-parallel-size 2 --bf16"
    result = run_in_process(
        tmp_path, *(f"{device_type}=2:{flags} --device {device_type}" for device_type in ("cpu", "sim"))
    )
    assert_runs_equal(tmp_path, "cpu", "sim")
    log = (tmp_path / "sim.log").read_text()
    assert "simulated device" in log and HOST_COPY_WARNING not in log
    assert "torch: fused attention (1)" in " ".join(log.replace("│", "").split())
    assert result["checked"] == 0, result["table"]
    lines = result["table"].splitlines()
    assert [line.split()[1] for line in lines if line.startswith("check ")] == CHECK_NAMES.split()
    assert "torch.nn.functional.scaled_dot_product_attention" in result["table"]


@pytest.mark.slow
def test_host_collectives_warn_and_equal_cpu(tmp_path: Path) -> None:
    flags = f"{STEPS} --model-parallel-size 2 --bf16"
    run_in_process(tmp_path, f"cpu=2:{flags} --device cpu", f"host=2:{flags} --device sim {HOST_FLAGS}")
    assert_runs_equal(tmp_path, "cpu", "host")
    assert (tmp_path / "host.log").read_text().count(HOST_COPY_WARNING) == 1
    assert "2 ranks share 1 sim device on this host" in (tmp_path / "host.log").read_text()


@pytest.mark.slow
def test_pipeline_with_dropout_and_zero_resumes_on_cpu(tmp_path: Path) -> None:
    """Masks are those of the CPU where they are hashes; the model is cut in every direction."""
    layout_flags = (
        "--train-iters 3 --eval-iters 0 --layout-independent-dropout --model-parallel-size 2 --pipe-parallel-size 2"
    )
    run_in_process(tmp_path, f"cpu=4:{layout_flags} --device cpu", f"sim=4:{layout_flags} --device sim")
    assert_runs_equal(tmp_path, "cpu", "sim")
    zero_flags = f"{STEPS} --zero-stage 1 --bf16"
    runs = [
        f"{device_type}=2:{zero_flags} --device {device_type.partition('-')[0]}"
        for device_type in ("cpu-zero", "sim-zero")
    ]
    run_in_process(tmp_path, *runs)
    assert_runs_equal(tmp_path, "cpu-zero", "sim-zero")
    resume_flags = "--train-iters 5 --lr-decay-iters 3 --eval-iters 0 --layout-independent-dropout --load"
    runs = [f"{source_run}-on=1:{resume_flags} {tmp_path / source_run} --device cpu" for source_run in ("cpu", "sim")]
    run_in_process(tmp_path, *runs)
    assert_runs_equal(tmp_path, "cpu-on", "sim-on", steps=5)


LAYOUTS = {
    "tensor x pipe": "4:--model-parallel-size 2 --pipe-parallel-size 2",
    "tensor x pipe x data": "8:--model-parallel-size 2 --pipe-parallel-size 2 --sequence-parallel",
    "gpipe": "2:--pipe-parallel-size 2 --pipeline-schedule gpipe",
    "zb-h1": "2:--pipe-parallel-size 2 --pipeline-schedule zb-h1",
    "interleaved": "2:--pipe-parallel-size 2 --pipeline-chunks 2 --num-layers 4",
    "zero 1": "2:--zero-stage 1",
    "zero 2": "2:--zero-stage 2",
}
"""Without ZeRO 3: torch does not let a device in Python give back the memory of a weight."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_with_host_collectives_equals_cpu(layout: str, tmp_path: Path) -> None:
    ranks, _, extra = layout.partition(":")
    flags = f"{ranks}:{STEPS} --gas 4 --bf16 {extra}"
    run_in_process(tmp_path, f"cpu={flags} --device cpu", f"host={flags} --device sim {HOST_FLAGS}")
    assert_runs_equal(tmp_path, "cpu", "host")


@pytest.mark.slow
def test_unfused_attention_without_adaptor_is_close_to_cpu(tmp_path: Path) -> None:
    run_in_process(tmp_path, f"cpu=1:{STEPS} --device cpu")
    result = run_in_process(tmp_path, f"sim=1:{STEPS} --device sim", ENABLE_TORCH_ADAPTOR="0")
    assert read_losses_and_norms(tmp_path / "cpu") != read_losses_and_norms(tmp_path / "sim")
    for cpu_values, sim_values in zip(
        read_losses_and_norms(tmp_path / "cpu"), read_losses_and_norms(tmp_path / "sim"), strict=True
    ):
        assert sim_values == pytest.approx(cpu_values, rel=1e-5)
    assert result["checked"] == 0, result["table"]
    assert "fused attention               off" in result["table"]

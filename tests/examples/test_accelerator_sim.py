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
THROUGH_HOST = "--distributed-backend gloo"
SAID = "sim tensors are copied through the host and sent by gloo (host_copies): slow, for tests of results"
CHECKS = "answers copies views in_place formats layers optimizer generators modules deepspeed collectives reversible"


def start(folder: Path, *runs: str, **environment: str) -> dict[str, Any]:
    """Train ``runs`` in a fresh process and return what it wrote down; each run's code must be 0."""
    paths = os.pathsep.join([str(ROOT), str(PLUGIN), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "tests.examples.accelerator_sim", str(folder), *runs],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "result.json").read_text())
    for name, codes in result["codes"].items():
        assert not any(codes), (folder / f"{name}.log").read_text()
    return result


def numbers(folder: Path) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of every step."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(record["loss"], record["grad_norm"]) for record in records if record["kind"] == "train"]


def assert_same(folder: Path, one: str, other: str, steps: int = 3) -> None:
    """Check that two runs have the losses, gradient norms, weights and moments of one another, bit for bit."""
    assert numbers(folder / one) == numbers(folder / other)
    assert len(numbers(folder / one)) in (steps, steps - 3), "a run that goes on takes the steps that are left"
    last = [open_folder(folder / name / "checkpoints" / f"step-{steps:08d}") for name in (one, other)]
    found = [row for row in tensor_differences(*last) if not row.name.startswith("rng/")]
    assert any(name.startswith("optimizer/exp_avg/") for name in last[0].names()) and not found


def test_gpt2_trains_on_two_tensor_ranks_to_the_numbers_of_the_cpu(tmp_path: Path) -> None:
    """In bf16, since attention in fp32 on a CPU does not use torch's kernel; with the device's own collectives."""
    split = f"{STEPS} --model-parallel-size 2 --bf16"
    result = start(tmp_path, *(f"{kind}=2:{split} --device {kind}" for kind in ("cpu", "sim")))
    assert_same(tmp_path, "cpu", "sim")
    log = (tmp_path / "sim.log").read_text()
    assert "simulated device" in log and SAID not in log
    assert "torch: fused attention (1)" in " ".join(log.replace("│", "").split())
    assert result["checked"] == 0, result["table"]
    lines = result["table"].splitlines()
    assert [line.split()[1] for line in lines if line.startswith("check ")] == CHECKS.split()
    assert "torch.nn.functional.scaled_dot_product_attention" in result["table"]


@pytest.mark.slow
def test_collectives_through_the_host_are_reported_and_have_the_bits_of_the_cpu(tmp_path: Path) -> None:
    split = f"{STEPS} --model-parallel-size 2 --bf16"
    start(tmp_path, f"cpu=2:{split} --device cpu", f"host=2:{split} --device sim {THROUGH_HOST}")
    assert_same(tmp_path, "cpu", "host")
    assert (tmp_path / "host.log").read_text().count(SAID) == 1
    assert "2 ranks share 1 sim device on this host" in (tmp_path / "host.log").read_text()


@pytest.mark.slow
def test_it_trains_in_a_pipeline_with_dropout_and_zero_and_goes_on_on_the_cpu(tmp_path: Path) -> None:
    """Masks are those of the CPU where they are hashes; the model is cut in every direction."""
    cut = "--train-iters 3 --eval-iters 0 --layout-independent-dropout --model-parallel-size 2 --pipe-parallel-size 2"
    start(tmp_path, f"cpu=4:{cut} --device cpu", f"sim=4:{cut} --device sim")
    assert_same(tmp_path, "cpu", "sim")
    more = f"{STEPS} --zero-stage 1 --bf16"
    runs = [f"{kind}=2:{more} --device {kind.partition('-')[0]}" for kind in ("cpu-zero", "sim-zero")]
    start(tmp_path, *runs)
    assert_same(tmp_path, "cpu-zero", "sim-zero")
    goes_on = "--train-iters 5 --lr-decay-iters 3 --eval-iters 0 --layout-independent-dropout --load"
    runs = [f"{one}-on=1:{goes_on} {tmp_path / one} --device cpu" for one in ("cpu", "sim")]
    start(tmp_path, *runs)
    assert_same(tmp_path, "cpu-on", "sim-on", steps=5)


THROUGH = {
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
@pytest.mark.parametrize("layout", THROUGH.values(), ids=THROUGH)
def test_every_layout_through_the_host_has_the_bits_of_the_cpu(layout: str, tmp_path: Path) -> None:
    ranks, _, extra = layout.partition(":")
    split = f"{ranks}:{STEPS} --gas 4 --bf16 {extra}"
    start(tmp_path, f"cpu={split} --device cpu", f"host={split} --device sim {THROUGH_HOST}")
    assert_same(tmp_path, "cpu", "host")


@pytest.mark.slow
def test_without_the_adaptor_of_torch_attention_goes_in_steps_and_the_numbers_are_close(tmp_path: Path) -> None:
    start(tmp_path, f"cpu=1:{STEPS} --device cpu")
    result = start(tmp_path, f"sim=1:{STEPS} --device sim", ENABLE_TORCH_ADAPTOR="0")
    assert numbers(tmp_path / "cpu") != numbers(tmp_path / "sim")
    for here, there in zip(numbers(tmp_path / "cpu"), numbers(tmp_path / "sim"), strict=True):
        assert there == pytest.approx(here, rel=1e-5)
    assert result["checked"] == 0, result["table"]
    assert "fused attention               off" in result["table"]

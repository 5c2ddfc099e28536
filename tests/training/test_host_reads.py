"""In the steady state the host waits for the device once a step: for losses and gradient norm, in one copy."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.harness import run_ranks
from tests.helpers.host_reads import counted
from tests.training.steady import STEPS, WARM, engine_of, take, watched_by_cuda

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "accelerator_sim"
ONCE = {"tolist in tds/loss_reduction.py:read": 1}
"""Of every step, on every rank."""
SHAPES = {"tolist in megatron/mpu/data.py:_broadcast_shapes": 2}
"""Of each of two micro-batches; of a table on the host likewise (tests/mpu/test_data.py)."""

SEEN = {"gpt2": ("--bf16 --clip-grad 1", "--bf16 --offload-optimizer"), "t5": ("--bf16 --clip-grad 1",)}
"""Flags whose steps are seen in one process, which takes longer to start than to train."""

ON_CPU_ONLY = ("megatron/ops/document_attention.py", "megatron/mpu/embedding_lookup.py")
"""Files that read values on a CPU only; the CUDA path is tested in ``tests/cuda``."""


def reads(rank: int, *made: Any) -> dict[str, float]:
    """Return by place how often the host waited in each step of the steady state."""
    engine, batches = engine_of(*made)
    if batches is not None:  # ahead of all steps: what is read of samples is of the host
        batches = iter([next(batches) for _ in range((WARM + STEPS) * engine.share.num_micro_batches)])
    take(engine, batches, range(WARM))
    with counted() as found:
        take(engine, batches, range(WARM, WARM + STEPS))
    return {
        name: number / STEPS for name, number in Counter(found).items() if not any(file in name for file in ON_CPU_ONLY)
    }


@pytest.mark.parametrize(
    ("data", "extra"),
    [
        (1, "--fp32 --clip-grad 1"),
        (2, "--bf16 --zero-stage 1 --checkpoint-activations --eod-mask-loss --reset-attention-mask"),
        pytest.param(2, "--fp32 --zero-stage 2", marks=pytest.mark.slow),
    ],
    ids=["one rank", "two replicas", "cut gradients"],
)
def test_one_stage_waits_once_in_a_step(data: int, extra: str) -> None:
    for found in run_ranks(data, reads, "gpt2", 1, 1, data, extra):
        assert found == ONCE


@pytest.mark.slow  # tests/cuda/test_matrix.py watches these in the short run
def test_tensor_ranks_and_t5_wait_once_in_a_step_and_for_shapes() -> None:
    for found in run_ranks(2, reads, "gpt2", 2, 1, 1, "--bf16 --sequence-parallel"):
        assert found == ONCE | SHAPES
    assert run_ranks(1, reads, "t5", 1, 1, 1, "--bf16 --checkpoint-activations --reset-attention-mask") == [ONCE]


def test_a_stage_of_a_pipeline_waits_once_in_a_step_and_reads_no_header_again() -> None:
    assert run_ranks(2, reads, "gpt2", 1, 2, 1, "--fp32 --clip-grad 1") == [ONCE, ONCE]


@functools.cache
def in_own_process(kind: str, family: str, *lines: str) -> list[Any]:
    """Return what ``tests.training.steady`` has seen with each line of flags."""
    paths = os.pathsep.join([str(ROOT), str(PLUGIN), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    theirs = {"sim": "cpu"}.get(kind, kind)  # of the simulated one DeepSpeed is told when it is chosen
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.steady", kind, family, *lines],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": theirs},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


@pytest.mark.slow  # tests/cuda/test_matrix.py watches reads and copies of a device in the short run
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_between_host_and_device_go_the_data_and_what_the_host_reads(family: str) -> None:
    """On a device that is not the host: any other copy to it, of a table or a number, would be one that CUDA awaits."""
    fields = {"gpt2": 1, "t5": 4}[family]
    found = in_own_process("sim", family, *SEEN[family])[0]
    data = {"to the device in megatron/device.py": 2 * fields}
    assert found == data | {"to the host in tds/loss_reduction.py": 1}


@pytest.mark.slow  # tests/cuda/test_matrix.py watches reads and copies of a device in the short run
def test_with_offload_each_gradient_goes_once_and_each_weight_comes_once() -> None:
    found = {**in_own_process("sim", "gpt2", *SEEN["gpt2"])[1]}
    weights = found.pop("to the host in megatron/optim/offload.py")
    assert weights > 10
    assert found == {
        "to the device in megatron/device.py": 2,
        "to the host in tds/loss_reduction.py": 1,
        "to the device in megatron/optim/param_store.py": weights,
    }


def faked(rank: int) -> tuple[list[int], list[Any]]:
    """Return what ``watched_by_cuda`` sees of a CPU, and what it asks of CUDA."""
    mode, asked = [0], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[0])
        patch.setattr(torch.cuda, "set_sync_debug_mode", lambda new: asked.append(new) or set_to(new))

        def set_to(new: str | int) -> None:
            mode[0] = {"default": 0, "error": 2}.get(new, new)  # type: ignore[arg-type,call-overload]

        return watched_by_cuda(*engine_of("gpt2", extra="--fp32")), asked


def test_the_watch_of_cuda_is_off_for_the_one_read_of_each_step() -> None:
    """What the next test asks of a GPU, on a CPU that only writes it down."""
    assert run_ranks(1, faked) == [([2] * STEPS, ["error", *["default", 2] * STEPS, 0])]


@pytest.mark.gpu(only="its watch over waits of the host")
@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_cuda_sees_no_wait_in_a_step_but_the_one_read(family: str, precision: str) -> None:
    """Reading and copying of the data are within."""
    (seen,) = in_own_process("cuda", family, f"{precision} --clip-grad 1 --checkpoint-activations")
    assert seen == {"modes": [2] * STEPS, "notices": True}

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
from tests.helpers.host_reads import count_waits
from tests.training.steady import NUM_STEPS, NUM_WARMUP_STEPS, make_engine, record_sync_modes, run_steps

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "accelerator_sim"
READS_PER_STEP = {"tolist in tds/loss_reduction.py:read": 1}
"""Of every step, on every rank."""
SHAPE_READS = {"tolist in megatron/mpu/data.py:_broadcast_shapes": 2}
"""Of each of two micro-batches; of a table on the host likewise (tests/mpu/test_data.py)."""

WATCHED_FLAGS = {"gpt2": ("--bf16 --clip-grad 1", "--bf16 --offload-optimizer"), "t5": ("--bf16 --clip-grad 1",)}
"""Flags whose steps are seen in one process, which takes longer to start than to train."""

CPU_ONLY_FILES = ("megatron/ops/document_attention.py", "megatron/mpu/embedding_lookup.py")
"""Files that read values on a CPU only; the CUDA path is tested in ``tests/cuda``."""


def count_reads(rank: int, *engine_args: Any) -> dict[str, float]:
    """Return by place how often the host waited in each step of the steady state."""
    engine, batches = make_engine(*engine_args)
    if batches is not None:  # ahead of all steps: what is read of samples is of the host
        batches = iter([next(batches) for _ in range((NUM_WARMUP_STEPS + NUM_STEPS) * engine.share.num_micro_batches)])
    run_steps(engine, batches, range(NUM_WARMUP_STEPS))
    with count_waits() as read_counts:
        run_steps(engine, batches, range(NUM_WARMUP_STEPS, NUM_WARMUP_STEPS + NUM_STEPS))
    return {
        name: count / NUM_STEPS
        for name, count in Counter(read_counts).items()
        if not any(file in name for file in CPU_ONLY_FILES)
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
def test_single_stage_reads_once_per_step(data: int, extra: str) -> None:
    for read_counts in run_ranks(data, count_reads, "gpt2", 1, 1, data, extra):
        assert read_counts == READS_PER_STEP


@pytest.mark.slow  # tests/cuda/test_matrix.py watches these in the short run
def test_tensor_ranks_and_t5_read_once_per_step_and_for_shapes() -> None:
    for read_counts in run_ranks(2, count_reads, "gpt2", 2, 1, 1, "--bf16 --sequence-parallel"):
        assert read_counts == READS_PER_STEP | SHAPE_READS
    assert run_ranks(1, count_reads, "t5", 1, 1, 1, "--bf16 --checkpoint-activations --reset-attention-mask") == [
        READS_PER_STEP
    ]


def test_pipeline_stage_reads_once_per_step_without_headers() -> None:
    assert run_ranks(2, count_reads, "gpt2", 1, 2, 1, "--fp32 --clip-grad 1") == [READS_PER_STEP, READS_PER_STEP]


@functools.cache
def run_in_subprocess(device_type: str, family: str, *flag_lines: str) -> list[Any]:
    """Return what ``tests.training.steady`` has seen with each line of flags."""
    paths = os.pathsep.join([str(ROOT), str(PLUGIN), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    ds_accelerator = {"sim": "cpu"}.get(
        device_type, device_type
    )  # of the simulated one DeepSpeed is told when it is chosen
    process = subprocess.run(
        [sys.executable, "-m", "tests.training.steady", device_type, family, *flag_lines],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": ds_accelerator},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    results: list[Any] = json.loads(process.stdout.splitlines()[-1])
    return results


@pytest.mark.slow  # tests/cuda/test_matrix.py watches reads and copies of a device in the short run
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_only_data_and_losses_are_copied_between_host_and_device(family: str) -> None:
    """On a device that is not the host: any other copy to it, of a table or a number, would be one that CUDA awaits."""
    num_fields = {"gpt2": 1, "t5": 4}[family]
    copy_counts = run_in_subprocess("sim", family, *WATCHED_FLAGS[family])[0]
    data_copies = {"to the device in megatron/device.py": 2 * num_fields}
    assert copy_counts == data_copies | {"to the host in tds/loss_reduction.py": 1}


@pytest.mark.slow  # tests/cuda/test_matrix.py watches reads and copies of a device in the short run
def test_offload_copies_each_gradient_and_weight_once() -> None:
    copy_counts = {**run_in_subprocess("sim", "gpt2", *WATCHED_FLAGS["gpt2"])[1]}
    num_weights = copy_counts.pop("to the host in megatron/optim/offload.py")
    assert num_weights > 10
    assert copy_counts == {
        "to the device in megatron/device.py": 2,
        "to the host in tds/loss_reduction.py": 1,
        "to the device in megatron/optim/param_store.py": num_weights,
    }


def watch_fake_cuda(rank: int) -> tuple[list[int], list[Any]]:
    """Return what ``record_sync_modes`` sees of a CPU, and what it asks of CUDA."""
    mode, requested_modes = [0], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[0])
        patch.setattr(torch.cuda, "set_sync_debug_mode", lambda new: requested_modes.append(new) or set_mode(new))

        def set_mode(new: str | int) -> None:
            mode[0] = {"default": 0, "error": 2}.get(new, new)  # type: ignore[arg-type,call-overload]

        return record_sync_modes(*make_engine("gpt2", extra_args="--fp32")), requested_modes


def test_cuda_sync_check_is_disabled_for_one_read_per_step() -> None:
    """What the next test asks of a GPU, on a CPU that only writes it down."""
    assert run_ranks(1, watch_fake_cuda) == [([2] * NUM_STEPS, ["error", *["default", 2] * NUM_STEPS, 0])]


@pytest.mark.gpu(only="its watch over waits of the host")
@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_cuda_step_synchronizes_only_for_one_read(family: str, precision: str) -> None:
    """Reading and copying of the data are within."""
    (result,) = run_in_subprocess("cuda", family, f"{precision} --clip-grad 1 --checkpoint-activations")
    assert result == {"modes": [2] * NUM_STEPS, "notices": True}

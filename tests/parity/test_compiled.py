"""What users were told cannot be had together: bf16, SDPA, torch.compile, recompute on the host, and a pipeline.

Each run here trains beside a plain one of the same number format in one process. Tolerances are those of bf16 (8 bits:
one part in 256 of what a sum is made of) and of fp32, over all steps; observed values stand beside them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.utils import counters

from megatron.training import setup
from megatron.training.compile import compile_layers
from megatron.training.parity import Trace, compare
from tests.helpers import harness
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import make_flags, split_global_batch, trace_one_process, trace_rank

STEPS = 5
HOST_RECOMPUTE = "--checkpoint-activations --checkpoint-in-cpu --contigious-checkpointing"
DROPOUT_RATES = "--attention-dropout 0.1 --hidden-dropout 0.1"


@pytest.fixture(autouse=True)
def _long_group_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks wait for one that compiles, which may take more than 20 s on a busy machine."""
    monkeypatch.setattr(harness, "GROUP_TIMEOUT_S", 600)


def assert_close_in_bf16(diff: Any) -> None:
    assert diff.loss <= 2e-2 and diff.norm <= 3e-2, diff


def compiled_rank(rank: int, backend: str, cache: str, argv: list[str], size: int) -> tuple[Trace, int]:
    """Train with ``--compile`` and return what was seen and the number of graphs."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    original = compile_layers
    setup.compile_layers = lambda *args, **kwargs: original(*args, **kwargs, backend=backend)  # type: ignore[assignment]
    num_graphs_before = counters["stats"]["unique_graphs"]  # of the process that this one is a fork of
    trace = trace_rank(rank, argv, size, STEPS, 0)
    return trace, counters["stats"]["unique_graphs"] - num_graphs_before


def train_compiled(tensor: int, pipe: int, extra: str, backend: str, cache: Path) -> list[Trace]:
    micro, gas = split_global_batch(1, 4)
    argv = make_flags(tensor, pipe, micro_batch_size=micro, gas=gas, extra=f"{extra} --compile")
    size = tensor * pipe
    results = run_ranks(size, compiled_rank, backend, str(cache), argv, size, deadline_s=900.0)
    assert all(0 < num_graphs <= 12 for _, num_graphs in results), [num_graphs for _, num_graphs in results]
    return [trace for trace, _ in results]


@pytest.mark.slow  # tests/training/test_compiled.py is in the short run
def test_bf16_sdpa_pipeline_with_host_recompute_matches_serial() -> None:
    micro, gas = split_global_batch(1, 4)
    extra = f"--bf16 {DROPOUT_RATES}"
    serial_trace = trace_one_process(micro, gas, extra, steps=STEPS)
    argv = make_flags(1, 2, micro_batch_size=micro, gas=gas, extra=f"{extra} {HOST_RECOMPUTE}")
    diff = compare(serial_trace, run_ranks(2, trace_rank, argv, 2, STEPS, 0))
    assert diff.first_loss == 0.0
    assert_close_in_bf16(diff)
    assert_close_in_bf16(compare(trace_one_process(micro, gas, f"--fp32 {DROPOUT_RATES}", steps=STEPS), [serial_trace]))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved --pipeline-chunks 2"])
@pytest.mark.parametrize(
    "extra", ["", DROPOUT_RATES, f"{DROPOUT_RATES} {HOST_RECOMPUTE}"], ids=["plain", "dropout", "recompute"]
)
def test_compiled_pipeline_layers_match_single_process(extra: str, schedule: str, tmp_path: Path) -> None:
    """In fp32, by graphs that run as they are; gradients of biases and of a tied weight are rounded elsewhere."""
    micro, gas = split_global_batch(1, 4)
    plain = trace_one_process(micro, gas, f"--fp32 {extra.replace(HOST_RECOMPUTE, '')}", steps=STEPS)
    diff = compare(plain, train_compiled(1, 2, f"--fp32 {extra} --pipeline-schedule {schedule}", "aot_eager", tmp_path))
    assert diff.first_loss <= 1e-6 and diff.loss <= 1e-5 and diff.norm <= 1e-5, diff


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("sharding_flag", ["--partition-activations", "--sequence-parallel"])
def test_compiled_tensor_parallel_layers_match_plain_layers(
    tensor: int, pipe: int, sharding_flag: str, tmp_path: Path
) -> None:
    micro, gas = split_global_batch(1, 4)
    plain = trace_one_process(micro, gas, "--fp64", steps=STEPS)
    diff = compare(
        plain, train_compiled(tensor, pipe, f"--fp64 {HOST_RECOMPUTE} {sharding_flag}", "aot_eager", tmp_path)
    )
    assert diff.loss <= 1e-12 and diff.gradient <= 1e-11 and diff.norm <= 1e-12, diff


def evaluated_rank(rank: int, cache: str, argv: list[str], size: int) -> Trace:
    original = compile_layers
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    if "--compile" in argv:
        setup.compile_layers = lambda *args, **kwargs: original(*args, **kwargs, backend="aot_eager")  # type: ignore[assignment]
    return trace_rank(rank, argv, size, STEPS, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("data", [1, 2])
def test_compiled_replicas_train_and_evaluate_like_plain_layers(data: int, tmp_path: Path) -> None:
    """With dropout, which an evaluation leaves out and the steps after it draw again."""
    micro, gas = split_global_batch(data, 1)
    traces = []
    for variant_flags in ("", "--zero-stage 2 --offload-optimizer --compile"):
        zero_flags = variant_flags if data > 1 else variant_flags.replace("--zero-stage 2 ", "")
        argv = make_flags(
            1, 1, micro_batch_size=micro, gas=gas, extra=f"--fp32 {DROPOUT_RATES} --checkpoint-activations {zero_flags}"
        )
        traces.append(run_ranks(data, evaluated_rank, str(tmp_path), argv, data, deadline_s=300.0))
    for plain, compiled_trace in zip(*traces, strict=True):
        assert compiled_trace.losses == pytest.approx(plain.losses, rel=1e-6)
        assert compiled_trace.eval_losses == pytest.approx(plain.eval_losses, rel=1e-6)
        assert len(plain.eval_losses) == STEPS


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("dtype", "pipe"), [("fp32", 1), ("fp32", 2), ("bf16", 2)])
def test_inductor_kernels_train_like_plain_layers(dtype: str, pipe: int, tmp_path: Path) -> None:
    micro, gas = split_global_batch(1, 4)
    extra = f"--{dtype} {DROPOUT_RATES}"
    plain = trace_one_process(micro, gas, extra, steps=STEPS)
    diff = compare(plain, train_compiled(1, pipe, f"{extra} {HOST_RECOMPUTE}", "inductor", tmp_path))
    if dtype == "bf16":
        assert_close_in_bf16(diff)
    else:
        assert diff.loss <= 1e-5 and diff.norm <= 1e-4, diff

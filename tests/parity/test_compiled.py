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
from tests.helpers.layouts import batches, flags, serial, trace_rank

STEPS = 5
WAITING = "--checkpoint-activations --checkpoint-in-cpu --contigious-checkpointing"
RATES = "--attention-dropout 0.1 --hidden-dropout 0.1"


@pytest.fixture(autouse=True)
def _time_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks wait for one that compiles, which may take more than 20 s on a busy machine."""
    monkeypatch.setattr(harness, "GROUP_TIMEOUT_S", 600)


def close_to_bf16(found: Any) -> None:
    assert found.loss <= 2e-2 and found.norm <= 3e-2, found


def compiled_rank(rank: int, backend: str, cache: str, argv: list[str], size: int) -> tuple[Trace, int]:
    """Train with ``--compile`` and return what was seen and the number of graphs."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    built = compile_layers
    setup.compile_layers = lambda *args, **how: built(*args, **how, backend=backend)  # type: ignore[assignment]
    before = counters["stats"]["unique_graphs"]  # of the process that this one is a fork of
    trace = trace_rank(rank, argv, size, STEPS, 0)
    return trace, counters["stats"]["unique_graphs"] - before


def compiled(tensor: int, pipe: int, extra: str, backend: str, cache: Path) -> list[Trace]:
    micro, gas = batches(1, 4)
    argv = flags(tensor, pipe, micro=micro, gas=gas, extra=f"{extra} --compile")
    size = tensor * pipe
    found = run_ranks(size, compiled_rank, backend, str(cache), argv, size, deadline_s=900.0)
    assert all(0 < graphs <= 12 for _, graphs in found), [graphs for _, graphs in found]
    return [trace for trace, _ in found]


@pytest.mark.slow  # tests/training/test_compiled.py is in the short run
def test_bf16_and_sdpa_run_in_a_pipeline_that_recomputes_from_the_host() -> None:
    micro, gas = batches(1, 4)
    extra = f"--bf16 {RATES}"
    alone = serial(micro, gas, extra, steps=STEPS)
    argv = flags(1, 2, micro=micro, gas=gas, extra=f"{extra} {WAITING}")
    found = compare(alone, run_ranks(2, trace_rank, argv, 2, STEPS, 0))
    assert found.first_loss == 0.0
    close_to_bf16(found)
    close_to_bf16(compare(serial(micro, gas, f"--fp32 {RATES}", steps=STEPS), [alone]))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved --pipeline-chunks 2"])
@pytest.mark.parametrize("extra", ["", RATES, f"{RATES} {WAITING}"], ids=["plain", "dropout", "recompute"])
def test_compiled_layers_in_a_pipeline_give_what_one_process_gives(extra: str, schedule: str, tmp_path: Path) -> None:
    """In fp32, by graphs that run as they are; gradients of biases and of a tied weight are rounded elsewhere."""
    micro, gas = batches(1, 4)
    plain = serial(micro, gas, f"--fp32 {extra.replace(WAITING, '')}", steps=STEPS)
    found = compare(plain, compiled(1, 2, f"--fp32 {extra} --pipeline-schedule {schedule}", "aot_eager", tmp_path))
    assert found.first_loss <= 1e-6 and found.loss <= 1e-5 and found.norm <= 1e-5, found


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("cut", ["--partition-activations", "--sequence-parallel"])
def test_compiled_layers_on_tensor_ranks_equal_plain_ones(tensor: int, pipe: int, cut: str, tmp_path: Path) -> None:
    micro, gas = batches(1, 4)
    plain = serial(micro, gas, "--fp64", steps=STEPS)
    found = compare(plain, compiled(tensor, pipe, f"--fp64 {WAITING} {cut}", "aot_eager", tmp_path))
    assert found.loss <= 1e-12 and found.gradient <= 1e-11 and found.norm <= 1e-12, found


def evaluated_rank(rank: int, cache: str, argv: list[str], size: int) -> Trace:
    built = compile_layers
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    if "--compile" in argv:
        setup.compile_layers = lambda *args, **how: built(*args, **how, backend="aot_eager")  # type: ignore[assignment]
    return trace_rank(rank, argv, size, STEPS, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("data", [1, 2])
def test_compiled_layers_are_evaluated_and_trained_on_by_replicas_as_plain_ones(data: int, tmp_path: Path) -> None:
    """With dropout, which an evaluation leaves out and the steps after it draw again."""
    micro, gas = batches(data, 1)
    found = []
    for side in ("", "--zero-stage 2 --offload-optimizer --compile"):
        zero = side if data > 1 else side.replace("--zero-stage 2 ", "")
        argv = flags(1, 1, micro=micro, gas=gas, extra=f"--fp32 {RATES} --checkpoint-activations {zero}")
        found.append(run_ranks(data, evaluated_rank, str(tmp_path), argv, data, deadline_s=300.0))
    for plain, compiled_trace in zip(*found, strict=True):
        assert compiled_trace.losses == pytest.approx(plain.losses, rel=1e-6)
        assert compiled_trace.eval_losses == pytest.approx(plain.eval_losses, rel=1e-6)
        assert len(plain.eval_losses) == STEPS


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("dtype", "pipe"), [("fp32", 1), ("fp32", 2), ("bf16", 2)])
def test_kernels_of_inductor_train_as_plain_layers(dtype: str, pipe: int, tmp_path: Path) -> None:
    micro, gas = batches(1, 4)
    extra = f"--{dtype} {RATES}"
    plain = serial(micro, gas, extra, steps=STEPS)
    found = compare(plain, compiled(1, pipe, f"{extra} {WAITING}", "inductor", tmp_path))
    if dtype == "bf16":
        close_to_bf16(found)
    else:
        assert found.loss <= 1e-5 and found.norm <= 1e-4, found

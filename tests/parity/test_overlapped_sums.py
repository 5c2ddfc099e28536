"""Sums over replicas within the last backward of a step, on both engines: the numbers of sums made after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron.training.parity import Trace
from tds import backward_state, gradients
from tds.engine import weight_grad_store
from tests.helpers import t5_runs
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import make_flags, split_global_batch, trace_rank
from tests.parity.test_zero_parts import assert_same_bits

STEPS = 3
BUCKET_BYTES = 16000


def watch_weight_backward() -> Callable[[], bool]:
    """Return what tells whether the half of a split backward that is for weights runs, with weights still to come."""
    pending: list[Any] = []
    original_run, original_call_run = weight_grad_store.WeightGradStore.run, weight_grad_store._LinearCall.run

    def recording_run(splitter: weight_grad_store.WeightGradStore, key: Any, *on_done: Any) -> None:
        pending[:] = splitter._deferred[key]
        original_run(splitter, key, *on_done)

    def consuming_run(linear_call: Any) -> Any:
        pending.pop()
        return original_call_run(linear_call)

    weight_grad_store.WeightGradStore.run, weight_grad_store._LinearCall.run = recording_run, consuming_run  # type: ignore[assignment, method-assign]
    return lambda: bool(pending)


def record_overlap(rank: int, argv: list[str], size: int, trace: Any) -> tuple[Trace, list[bool]]:
    """Return the trace, and of each sum of a bucket whether a backward, or one of its halves, ran as it started.

    All sums are cut into the same small buckets, whenever they start: where there are more than two replicas, a number
    rounds as its place in a bucket says.
    """
    is_overlapped: list[bool] = []
    is_weight_backward_running = watch_weight_backward()

    original_start = gradients.GradientBucket.start_all_reduce

    def recording_start(*args: Any) -> gradients.GradientBucket:
        is_overlapped.append(backward_state.is_running() or is_weight_backward_running())
        return original_start(*args)

    gradients.GradientBucket.start_all_reduce = recording_start  # type: ignore[method-assign]
    gradients.BUCKET_BYTES = BUCKET_BYTES
    return trace(rank, argv, size, STEPS, 0), is_overlapped


def check_overlap(
    tensor: int, pipe: int, data: int, extra: str, runner: Any = (make_flags, trace_rank), gas: int = 2
) -> None:
    make_flags, trace = runner
    micro, gas = split_global_batch(data, gas)
    size = tensor * pipe * data
    runs = [
        run_ranks(
            size,
            record_overlap,
            make_flags(tensor, pipe, micro_batch_size=micro, gas=gas, extra=f"{extra} {switch}"),
            size,
            trace,
        )
        for switch in ("--overlap-grad-reduce", "--no-overlap-grad-reduce")
    ]
    for (_, overlapped), (_, sequential) in zip(*runs, strict=True):
        assert sum(overlapped) >= 2 * STEPS and not any(sequential), "and at least two in each step"
    traces = [[trace for trace, _ in ranks] for ranks in runs]
    assert_same_bits(*traces)


def test_single_stage_accumulation_in_fp32_is_bitwise_equal() -> None:
    check_overlap(1, 1, 2, "--fp32 --clip-grad 0.5")


@pytest.mark.slow  # stages that put weights off, below, are the quick ones
def test_interleaved_stages_are_bitwise_equal() -> None:
    check_overlap(1, 2, 2, "--fp32 --pipeline-chunks 2 --zero-stage 1")


def test_deferred_weight_grads_are_bitwise_equal() -> None:
    check_overlap(1, 2, 2, "--fp32 --pipeline-schedule zb-h1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "extra"),
    [
        ((1, 1, 4), "--fp32"),
        ((2, 1, 2), "--bf16 --checkpoint-activations"),
        ((1, 1, 2), "--bf16 --zero-stage 1 --offload-optimizer"),
        ((1, 1, 2), "--fp64 --untie-embeddings-and-output-weights"),
        ((1, 2, 2), "--fp32 --pipeline-schedule zb-h1 --pipeline-chunks 2"),
        ((1, 2, 2), "--bf16 --pipeline-schedule gpipe"),
        ((1, 1, 2), "--fp32 --gradient-accumulation-fusion --checkpoint-activations"),
        ((2, 1, 2), "--fp32 --gradient-accumulation-fusion --zero-stage 1"),
        ((1, 2, 2), "--fp32 --gradient-accumulation-fusion --pipeline-schedule zb-h1"),
        ((1, 2, 2), "--fp32 --gradient-accumulation-fusion --pipeline-chunks 2"),
    ],
    ids=str,
)
def test_other_layouts_and_precisions_are_bitwise_equal(layout: tuple[int, int, int], extra: str) -> None:
    check_overlap(*layout, extra, gas=1 if layout[2] == 4 else 2)


@pytest.mark.slow
@pytest.mark.parametrize(("pipe", "extra"), [(1, "--fp32"), (2, "--fp32"), (1, "--bf16 --denoisers R,X,S")])
def test_t5_with_shared_tables_is_bitwise_equal(pipe: int, extra: str) -> None:
    check_overlap(1, pipe, 2, extra, (t5_runs.RUNS.make_flags, t5_runs.RUNS.trace_rank))

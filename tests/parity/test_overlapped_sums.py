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
from tests.helpers.layouts import batches, flags, trace_rank
from tests.parity.test_zero_parts import assert_same_bits

STEPS = 3
BYTES = 16000


def watch_weights() -> Callable[[], bool]:
    """Return what tells whether the half of a split backward that is for weights runs, with weights still to come."""
    waiting: list[Any] = []
    run, made = weight_grad_store.WeightGradStore.run, weight_grad_store._LinearCall.run

    def running(splitter: weight_grad_store.WeightGradStore, key: Any, *on_done: Any) -> None:
        waiting[:] = splitter._put_off[key]
        run(splitter, key, *on_done)

    def making(put_off: Any) -> Any:
        waiting.pop()
        return made(put_off)

    weight_grad_store.WeightGradStore.run, weight_grad_store._LinearCall.run = running, making  # type: ignore[assignment, method-assign]
    return lambda: bool(waiting)


def watched(rank: int, argv: list[str], size: int, trace: Any) -> tuple[Trace, list[bool]]:
    """Return the trace, and of each sum of a bucket whether a backward, or one of its halves, ran as it started.

    All sums are cut into the same small buckets, whenever they start: where there are more than two replicas, a number
    rounds as its place in a bucket says.
    """
    within: list[bool] = []
    makes_weights = watch_weights()

    start = gradients.GradientBucket.start_all_reduce

    def noting(*args: Any) -> gradients.GradientBucket:
        within.append(backward_state.is_running() or makes_weights())
        return start(*args)

    gradients.GradientBucket.start_all_reduce = noting  # type: ignore[method-assign]
    gradients.BUCKET_BYTES = BYTES
    return trace(rank, argv, size, STEPS, 0), within


def check(tensor: int, pipe: int, data: int, extra: str, of: Any = (flags, trace_rank), gas: int = 2) -> None:
    made, trace = of
    micro, gas = batches(data, gas)
    size = tensor * pipe * data
    both = [
        run_ranks(size, watched, made(tensor, pipe, micro=micro, gas=gas, extra=f"{extra} {switch}"), size, trace)
        for switch in ("--overlap-grad-reduce", "--no-overlap-grad-reduce")
    ]
    for (_, early), (_, late) in zip(*both, strict=True):
        assert sum(early) >= 2 * STEPS and not any(late), "and at least two in each step"
    traces = [[trace for trace, _ in ranks] for ranks in both]
    assert_same_bits(*traces)


def test_one_stage_with_accumulation_in_fp32_has_the_same_bits() -> None:
    check(1, 1, 2, "--fp32 --clip-grad 0.5")


@pytest.mark.slow  # stages that put weights off, below, are the quick ones
def test_stages_of_two_chunks_have_the_same_bits() -> None:
    check(1, 2, 2, "--fp32 --pipeline-chunks 2 --zero-stage 1")


def test_stages_that_put_weights_off_have_the_same_bits() -> None:
    check(1, 2, 2, "--fp32 --pipeline-schedule zb-h1")


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
def test_other_layouts_and_precisions_have_the_same_bits(layout: tuple[int, int, int], extra: str) -> None:
    check(*layout, extra, gas=1 if layout[2] == 4 else 2)


@pytest.mark.slow
@pytest.mark.parametrize(("pipe", "extra"), [(1, "--fp32"), (2, "--fp32"), (1, "--bf16 --denoisers R,X,S")])
def test_t5_with_shared_tables_has_the_same_bits(pipe: int, extra: str) -> None:
    check(1, pipe, 2, extra, (t5_runs.RUNS.flags, t5_runs.RUNS.trace_rank))

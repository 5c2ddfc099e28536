"""--gradient-accumulation-fusion in every layout and on both engines: one process, and the same bits in schedules."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.optim.gradients import buffer as grad_buffer
from megatron.training.parity import Trace, compare
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import (
    check_fp64,
    make_flags,
    split_global_batch,
    trace_layout,
    trace_one_process,
    trace_rank,
)
from tests.parity.test_schedules import UNTIED, ZERO_BUBBLE, check_same_bits

FUSED = "--gradient-accumulation-fusion"
RECOMPUTE = "--checkpoint-activations"


def check_layout(grid: tuple[int, int, int], extra: str, gas: int = 2, steps: int = 3) -> None:
    """Compare with one process without the flag."""
    ranks = trace_layout(*grid, *split_global_batch(grid[2], gas), f"--fp64 {FUSED} {extra}", steps=steps)
    check_fp64(compare(trace_one_process(*split_global_batch(1, gas), steps=steps), ranks))


def test_deferred_weight_grads_with_fusion_equal_single_process() -> None:
    check_layout((1, 2, 2), f"{ZERO_BUBBLE} {RECOMPUTE} --zero-stage 1", gas=4, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", RECOMPUTE, "--zero-stage 1", "--no-overlap-grad-reduce", "--sequence-parallel"])
@pytest.mark.parametrize(
    ("grid", "schedule"),
    [
        ((1, 1, 1), ""),
        ((2, 1, 1), ""),
        ((1, 1, 2), ""),
        ((2, 1, 2), ""),
        ((1, 2, 1), ""),
        ((1, 2, 1), ZERO_BUBBLE),
        ((2, 2, 1), ZERO_BUBBLE),
        ((1, 2, 2), ""),
        ((1, 2, 2), ZERO_BUBBLE),
    ],
)
def test_every_layout_with_fusion_equals_single_process(grid: tuple[int, int, int], schedule: str, extra: str) -> None:
    if "sequence" in extra and grid[0] == 1:
        extra = "--loss-chunk-tokens 8"  # whose table's gradient autograd adds
    check_layout(grid, f"{schedule} {extra}")


@pytest.mark.slow
@pytest.mark.parametrize("extra_flags", ["", RECOMPUTE, f"{UNTIED} --activation gated-silu"])
@pytest.mark.parametrize("grid", [(1, 2, 1), (2, 2, 1), (1, 2, 2), (1, 4, 1)])
def test_schedules_are_bitwise_equal(grid: tuple[int, int, int], extra_flags: str) -> None:
    """In fp32, over whole backwards and halves of them."""
    batch_sizes = (split_global_batch(grid[2], 4)[0], 4)
    extra = f"--fp32 {FUSED} {extra_flags}"
    expected = trace_layout(*grid, *batch_sizes, extra)
    for schedule in (ZERO_BUBBLE, "--pipeline-schedule gpipe"):
        check_same_bits(expected, trace_layout(*grid, *batch_sizes, f"{extra} {schedule}"))


def train_scattered(rank: int, argv: list[str], size: int) -> Trace:
    """Train with gradients in slots, which gloo makes whole."""
    grad_buffer.USE_REDUCE_SCATTER = True
    return trace_rank(rank, argv, size, 3, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "extra"), [((1, 1, 2), ""), ((2, 1, 2), "--sequence-parallel"), ((1, 2, 2), ZERO_BUBBLE)]
)
def test_fused_products_accumulate_into_zero_1_slots(grid: tuple[int, int, int], extra: str) -> None:
    micro, gas = split_global_batch(grid[2], 2)
    size = grid[0] * grid[1] * grid[2]
    run_flags = f"--fp64 --zero-stage 1 {FUSED} {extra}"
    argv: Any = make_flags(grid[0], grid[1], micro_batch_size=micro, gas=gas, extra=run_flags)
    check_fp64(
        compare(
            trace_one_process(*split_global_batch(1, 2)), run_ranks(size, train_scattered, argv, size, deadline_s=100.0)
        )
    )

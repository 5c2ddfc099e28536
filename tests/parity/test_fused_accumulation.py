"""--gradient-accumulation-fusion in every layout and on both engines: one process, and the same bits in schedules."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.optim.gradients import buffer as grad_buffer
from megatron.training.parity import Trace, compare
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import batches, check_fp64, flags, serial, trace_rank, traces
from tests.parity.test_schedules import UNTIED, ZERO_BUBBLE, check_same_bits

FUSED = "--gradient-accumulation-fusion"
RECOMPUTE = "--checkpoint-activations"


def check(grid: tuple[int, int, int], extra: str, gas: int = 2, steps: int = 3) -> None:
    """Compare with one process without the flag."""
    ranks = traces(*grid, *batches(grid[2], gas), f"--fp64 {FUSED} {extra}", steps=steps)
    check_fp64(compare(serial(*batches(1, gas), steps=steps), ranks))


def test_stages_that_put_weights_off_equal_one_process_without_it() -> None:
    check((1, 2, 2), f"{ZERO_BUBBLE} {RECOMPUTE} --zero-stage 1", gas=4, steps=1)


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
def test_every_layout_equals_one_process_without_it(grid: tuple[int, int, int], schedule: str, extra: str) -> None:
    if "sequence" in extra and grid[0] == 1:
        extra = "--loss-chunk-tokens 8"  # whose table's gradient autograd adds
    check(grid, f"{schedule} {extra}")


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", RECOMPUTE, f"{UNTIED} --activation gated-silu"])
@pytest.mark.parametrize("grid", [(1, 2, 1), (2, 2, 1), (1, 2, 2), (1, 4, 1)])
def test_schedules_differ_in_no_bit(grid: tuple[int, int, int], more: str) -> None:
    """In fp32, over whole backwards and halves of them."""
    sizes = (batches(grid[2], 4)[0], 4)
    extra = f"--fp32 {FUSED} {more}"
    expected = traces(*grid, *sizes, extra)
    for schedule in (ZERO_BUBBLE, "--pipeline-schedule gpipe"):
        check_same_bits(expected, traces(*grid, *sizes, f"{extra} {schedule}"))


def scattered(rank: int, argv: list[str], size: int) -> Trace:
    """Train with gradients in slots, which gloo makes whole."""
    grad_buffer.SCATTERS = True
    return trace_rank(rank, argv, size, 3, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "extra"), [((1, 1, 2), ""), ((2, 1, 2), "--sequence-parallel"), ((1, 2, 2), ZERO_BUBBLE)]
)
def test_products_add_to_slots_of_zero_1(grid: tuple[int, int, int], extra: str) -> None:
    micro, gas = batches(grid[2], 2)
    size = grid[0] * grid[1] * grid[2]
    how = f"--fp64 --zero-stage 1 {FUSED} {extra}"
    argv: Any = flags(grid[0], grid[1], micro=micro, gas=gas, extra=how)
    check_fp64(compare(serial(*batches(1, 2)), run_ranks(size, scattered, argv, size, deadline_s=100.0)))

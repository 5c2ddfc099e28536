"""Every schedule of the pipeline trains the model of one process, and all of them to the same bit."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from megatron.training.parity import Trace
from tests.helpers.layouts import check_fp64, compare_layout, split_global_batch, trace_layout, trace_one_process

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
UNTIED = "--untie-embeddings-and-output-weights"
RECOMPUTE = "--checkpoint-activations"
INTERLEAVED = "--pipeline-chunks 2"
ZERO_BUBBLE = "--pipeline-schedule zb-h1"
SPLIT_CHUNKS = f"{ZERO_BUBBLE} {INTERLEAVED}"
ZB_V, DUAL_PIPE_V = "--pipeline-schedule zb-v", "--pipeline-schedule dualpipev"
QUICK_SCHEDULES = ("--pipeline-schedule gpipe", SPLIT_CHUNKS, "--pipeline-schedule auto", DUAL_PIPE_V)
"""Those of which bits are compared in the short run; what is put off, and chunks, are together in one."""
SCHEDULES = ("--pipeline-schedule gpipe", INTERLEAVED, ZERO_BUBBLE, SPLIT_CHUNKS, "--pipeline-schedule auto")
GRIDS = [(1, 2, 1), (2, 2, 1), (1, 2, 2), (1, 4, 1)]
"""(tensor, pipe, data) of every grid of 2 and 4 ranks with a pipeline."""


def model_flags(tensor: int, pipe: int) -> str:
    """Return a layer for each virtual stage, and dropout where the masks do not depend on the layout."""
    return f"{'--num-layers 8' if pipe == 4 else ''} {DROPOUT if tensor == 1 else ''}"


def check_grid(tensor: int, pipe: int, data: int, gas: int, schedule: str, extra: str) -> None:
    """Compare three steps with those of one process; replicas draw masks of their own, so there dropout is off."""
    model_size_flags = model_flags(tensor if data == 1 else 2, pipe)
    check_fp64(compare_layout(tensor, pipe, data, gas, f"--fp64 {model_size_flags} {extra}", schedule=schedule))


@pytest.mark.parametrize(
    ("grid", "gas", "schedule", "extra"),
    [
        pytest.param((1, 2, 1), 4, INTERLEAVED, RECOMPUTE, marks=pytest.mark.slow),
        ((2, 2, 1), 1, INTERLEAVED, UNTIED),
        pytest.param((1, 2, 2), 4, ZERO_BUBBLE, RECOMPUTE, marks=pytest.mark.slow),
        pytest.param((1, 4, 1), 2, ZERO_BUBBLE, UNTIED, marks=pytest.mark.slow),
        ((1, 2, 2), 4, SPLIT_CHUNKS, RECOMPUTE),
        pytest.param((1, 2, 2), 4, ZB_V, RECOMPUTE, marks=pytest.mark.slow),
        pytest.param((1, 4, 1), 8, ZB_V, "", marks=pytest.mark.slow),
        pytest.param((2, 2, 1), 2, DUAL_PIPE_V, UNTIED, marks=pytest.mark.slow),
    ],
)
def test_schedule_equals_single_process(grid: tuple[int, int, int], gas: int, schedule: str, extra: str) -> None:
    check_grid(*grid, gas, schedule, extra)


def all_combinations() -> list[tuple[tuple[int, int, int], int, str, str]]:
    """Return each schedule with each switch and number of micro-batches, on two of the four grids by turns."""
    schedules = (INTERLEAVED, ZERO_BUBBLE, SPLIT_CHUNKS, ZB_V, DUAL_PIPE_V)
    options = ("", UNTIED, RECOMPUTE, f"{UNTIED} {RECOMPUTE} --checkpoint-num-layers 2")
    axes = [list(enumerate(axis)) for axis in (GRIDS, (1, 2, 8), schedules, options)]
    rows = ([*zip(*row, strict=True)] for row in product(*axes))
    return [values for idxs, values in rows if sum(idxs) % 2 == 0]


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "gas", "schedule", "extra"), all_combinations())
def test_every_schedule_with_every_option_equals_single_process(
    grid: tuple[int, int, int], gas: int, schedule: str, extra: str
) -> None:
    """Rows E01, E04, E08, E12, E17 with micro-batches above and below the stages."""
    check_grid(*grid, gas, schedule, extra)


@pytest.mark.slow
def test_three_chunks_with_short_last_round_equal_single_process() -> None:
    extra = f"--fp64 {DROPOUT} --num-layers 7"
    reference = trace_one_process(2, 5, extra)
    for trace in trace_layout(1, 2, 1, 2, 5, f"{extra} --pipeline-chunks 3"):
        assert trace.losses == pytest.approx(reference.losses, abs=1e-12, rel=0)
        assert trace.grad_norms == pytest.approx(reference.grad_norms, rel=1e-12)


def bits_by_shard(ranks: list[Trace]) -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]:
    """Return gradient and final weight of each part that any rank holds, by its name and place."""
    return {
        (name, str(shard)): (gradient, trace.weights[name][1])
        for trace in ranks
        for name, (shard, gradient) in trace.gradients.items()
    }


def check_same_bits(first: list[Trace], second: list[Trace]) -> None:
    """Losses, evaluated losses, gradients and trained weights are equal to the bit."""
    for field in ("losses", "eval_losses"):
        assert len({tuple(getattr(trace, field)) for trace in [*first, *second]}) == 1
    first_bits, second_bits = bits_by_shard(first), bits_by_shard(second)
    assert first_bits.keys() == second_bits.keys()
    for key, pair in first_bits.items():
        assert all(x.equal(y) for x, y in zip(pair, second_bits[key], strict=True)), key


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(schedule, marks=() if schedule in QUICK_SCHEDULES else pytest.mark.slow)
        for schedule in (*SCHEDULES, DUAL_PIPE_V, ZB_V)
    ],
)
def test_schedules_are_bitwise_equal(schedule: str) -> None:
    """Row E10: fp32, untied, clipping off."""
    extra = f"--fp32 {UNTIED} {DROPOUT}"
    expected = trace_layout(1, 2, 1, 4, 4, extra, eval_every=3)
    check_same_bits(expected, trace_layout(1, 2, 1, 4, 4, f"{extra} {schedule}", eval_every=3))


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "schedule"), list(product(GRIDS, [*SCHEDULES, ZB_V, DUAL_PIPE_V])))
def test_schedules_are_bitwise_equal_on_any_grid(grid: tuple[int, int, int], schedule: str) -> None:
    """Row E10, also with a tied table: only two stages add to its gradient, and they do so once.

    In a V one stage has both ends, whose gradients add up in the order of its schedule: there the table is untied.
    """
    for gas, extra_flags in ((1, UNTIED), (8, f"{RECOMPUTE} {UNTIED if schedule in (ZB_V, DUAL_PIPE_V) else ''}")):
        extra = f"--fp32 {DROPOUT} --num-layers 8 {extra_flags}"
        batch_sizes = split_global_batch(grid[2], gas)
        expected = trace_layout(*grid, *batch_sizes, extra, eval_every=3)
        check_same_bits(expected, trace_layout(*grid, *batch_sizes, f"{extra} {schedule}", eval_every=3))

"""--fp8-format in every layout, compared with one process.

With --fp64, everything that is not in FP8 is exact to 1e-16, and the products of quantized operands are accumulated in
fp64. An element that is quantized differently in two layouts would change the loss by far more than the bounds.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megatron.config import parse
from megatron.models.registry import costs_of
from megatron.mpu import fp8_weights
from megatron.training.parity import Trace
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import (
    VOCAB,
    check_fp64,
    compare_layout,
    make_flags,
    trace_layout,
    trace_one_process,
    trace_rank,
)
from tests.parity.test_schedules import INTERLEAVED, RECOMPUTE, SPLIT_CHUNKS, ZB_V, ZERO_BUBBLE

FP8 = "--fp8-format e4m3 --hidden-size 64"
GATED = "--activation gated-silu --num-query-groups 2"
BLOCKS = "--fp8-recipe blockwise --hidden-size 512 --ff-hidden-size 256 --activation gated-silu --num-layers 2"
LATENT = (
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 16 --position-embedding-type rope"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32"
MTP = "--mtp-num-layers 1"
SP = "--sequence-parallel"


def check_layout(grid: tuple[int, int, int], gas: int, extra: str, schedule: str = "", context: int = 1) -> None:
    check_fp64(compare_layout(*grid, gas, f"--fp64 {FP8} {extra}", schedule=schedule, context=context))


@pytest.mark.parametrize(
    ("grid", "gas", "extra", "schedule"),
    [((2, 2, 1), 2, GATED, f"{ZERO_BUBBLE} {SP} {RECOMPUTE}"), ((2, 1, 2), 2, EXPERTS, "--zero-stage 1")],
)
def test_layout_equals_single_process(grid: tuple[int, int, int], gas: int, extra: str, schedule: str) -> None:
    check_layout(grid, gas, extra, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["", SP, f"{SP} --gradient-accumulation-fusion", "--zero-stage 1"])
@pytest.mark.parametrize("extra", ["", GATED, LATENT, EXPERTS, MTP, BLOCKS, "--first-last-layers-bf16"])
@pytest.mark.parametrize("grid", [(2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)])
def test_every_layout_equals_single_process(grid: tuple[int, int, int], extra: str, schedule: str) -> None:
    if grid[0] == 1:
        schedule = schedule.replace(SP, "")
    if grid[0] == 4:
        extra = extra.replace("--num-query-groups 2", "")
    if extra == BLOCKS and grid[0] == 4:
        extra = BLOCKS.replace("256", "512")
    check_layout(grid, 2, extra, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [INTERLEAVED, ZERO_BUBBLE, SPLIT_CHUNKS, ZB_V])
@pytest.mark.parametrize("grid", [(1, 2, 1), (2, 2, 1), (1, 2, 2)])
def test_every_schedule_equals_single_process(grid: tuple[int, int, int], schedule: str) -> None:
    check_layout(grid, 4, f"{GATED} --num-layers 4", schedule)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("extra", [GATED, LATENT, RECOMPUTE])
def test_sharded_gradients_and_weights_equal_single_process(zero: int, extra: str) -> None:
    check_layout((2, 1, 2), 2, extra, f"--zero-stage {zero}")


@pytest.mark.slow
@pytest.mark.parametrize("extra", [GATED, LATENT, EXPERTS])
@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 1, 1), (1, 2, 1)])
def test_context_parallelism_equals_single_process(grid: tuple[int, int, int], extra: str) -> None:
    check_layout(grid, 2, extra, context=2)


def test_bf16_layouts_agree_within_rounding() -> None:
    """FP8 differs from bf16 by its own rounding, and two layouts of FP8 by the rounding of bf16."""
    one, two = trace_one_process(4, 2, f"--bf16 {FP8}"), trace_layout(2, 1, 1, 4, 2, f"--bf16 {FP8}")
    plain = trace_one_process(4, 2, "--bf16 --hidden-size 64")
    assert two[0].losses == two[1].losses
    assert two[0].losses == pytest.approx(one.losses, abs=0.02)
    assert one.losses != plain.losses
    assert one.losses == pytest.approx(plain.losses, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(1, 1, 2), (2, 1, 2), (1, 2, 2)])
def test_distributed_experts_equal_single_process(grid: tuple[int, int, int]) -> None:
    check_layout(grid, 2, f"{EXPERTS} {SP if grid[0] > 1 else ''}", "--expert-model-parallel-size 2")


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", GATED, EXPERTS, BLOCKS])
def test_split_backward_passes_change_no_bit_in_bf16(extra: str) -> None:
    plain, split = (
        trace_layout(1, 2, 1, 2, 4, f"--bf16 {FP8} {extra} {schedule}")
        for schedule in ("--pipeline-schedule 1f1b", ZERO_BUBBLE)
    )
    for actual, expected in zip(split, plain, strict=True):
        check_equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", GATED, EXPERTS, BLOCKS])
def test_recomputation_changes_no_bit_in_bf16(extra: str) -> None:
    flags = f"--bf16 {FP8} {extra}"
    check_equal(trace_one_process(4, 2, f"{flags} {RECOMPUTE}"), trace_one_process(4, 2, flags))


def trace_sharing(rank: int, argv: list[str], world_size: int, is_sharing: bool) -> tuple[Trace, list[int]]:
    """Trace 3 steps on one rank; also return the bytes of the shared quantized weights at the end of each step."""
    original_save, original_free, num_bytes = fp8_weights.save, fp8_weights.free, [0]

    def save(*args: Any) -> None:
        if is_sharing:
            original_save(*args)
            num_bytes[-1] = fp8_weights.num_bytes()

    def free() -> None:
        original_free()
        num_bytes.append(0)

    fp8_weights.save, fp8_weights.free = save, free
    return trace_rank(rank, argv, world_size, 3, 0), num_bytes[:-1]


def check_sharing(grid: tuple[int, int, int], extra: str, *, is_sharing: bool = True, gas: int = 2) -> None:
    """Check that shared quantized weights change no bit, and occupy the memory that the planner counts."""
    tensor, pipe, data = grid
    size = tensor * pipe * data
    argv = make_flags(tensor, pipe, micro_batch_size=2, gas=gas, extra=f"--bf16 {FP8} {extra}")
    plain, shared = (run_ranks(size, trace_sharing, argv, size, is_on, deadline_s=100.0) for is_on in (False, True))
    config = parse(argv, world_size=size).with_vocab(VOCAB)
    costs = costs_of(config, is_on_cpu=True)
    bounds, unit_bytes = costs.stage_bounds(pipe), costs.fp8_weight_bytes(tensor)
    counted = [sum(unit_bytes[start:stop]) for start, stop in itertools.pairwise(bounds)]
    for (trace, num_bytes), (plain_trace, plain_bytes) in zip(shared, plain, strict=True):
        check_equal(trace, plain_trace)
        assert plain_bytes == [0] * 3
        assert (min(num_bytes) > 0) == is_sharing  # an expert without rows is not quantized in a step
    assert {max(num_bytes) for _, num_bytes in shared} == (set(counted) if is_sharing else {0})


def test_shared_weights_change_no_bit() -> None:
    check_sharing((1, 2, 1), GATED, gas=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "extra"),
    [
        ((1, 1, 1), ""),
        ((1, 1, 1), BLOCKS),
        ((1, 1, 1), f"{GATED} {RECOMPUTE}"),
        ((2, 1, 1), f"{GATED} {SP}"),
        ((1, 1, 1), LATENT),
        ((1, 1, 1), MTP),
        ((1, 2, 1), f"{GATED} {ZERO_BUBBLE} {RECOMPUTE}"),
        ((1, 1, 2), f"{EXPERTS} --zero-stage 1"),
        ((1, 1, 2), f"{GATED} --zero-stage 2"),
    ],
)
def test_shared_weights_change_no_bit_in_any_layout(grid: tuple[int, int, int], extra: str) -> None:
    check_sharing(grid, extra)


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "extra", "gas"), [((1, 1, 2), "--zero-stage 3", 2), ((1, 1, 1), "", 1)])
def test_weights_are_not_shared_if_it_saves_nothing(grid: tuple[int, int, int], extra: str, gas: int) -> None:
    """ZeRO 3 frees the gathered weights, and a single micro-batch needs each form once."""
    check_sharing(grid, extra, is_sharing=False, gas=gas)


def check_equal(actual: Trace, expected: Trace) -> None:
    """Check that losses, gradients and weights of two traces of a rank are equal to the bit."""
    assert actual.losses == expected.losses and actual.grad_norms == expected.grad_norms
    for shards, expected_shards in ((actual.gradients, expected.gradients), (actual.weights, expected.weights)):
        assert shards.keys() == expected_shards.keys()
        assert all(torch.equal(shards[name][1], expected_shards[name][1]) for name in shards)

"""A loss in chunks trains the same model in every layout and schedule, to the bit of one process where others do."""

from __future__ import annotations

import pytest

from megatron.training.parity import compare
from tests.helpers.layouts import check_fp64, compare_layout, split_global_batch, trace_layout, trace_one_process
from tests.parity.test_schedules import check_same_bits

CHUNKS = "--loss-chunk-tokens 5"
UNTIED = "--untie-embeddings-and-output-weights"
ZERO_BUBBLE = "--pipeline-schedule zb-h1"


def test_chunked_2_by_2_layout_equals_single_process() -> None:
    """Row E01: tied tables on two stages, gradients put off, layers recomputed."""
    ranks = trace_layout(2, 2, 1, *split_global_batch(1, 4), f"--fp64 {CHUNKS} --checkpoint-activations {ZERO_BUBBLE}")
    check_fp64(compare(trace_one_process(*split_global_batch(1, 4)), ranks))


@pytest.mark.slow
def test_chunked_pipeline_is_bitwise_single_process() -> None:
    """Row E10: fp32, untied, clipping off, evaluated losses too."""
    extra = f"--fp32 {UNTIED} {CHUNKS}"
    reference = trace_layout(1, 1, 1, 4, 4, extra, eval_every=3)
    for schedule in ("", ZERO_BUBBLE):
        check_same_bits(reference, trace_layout(1, 2, 1, 4, 4, f"{extra} {schedule}", eval_every=3))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["", "--pipeline-schedule gpipe", "--pipeline-chunks 2", ZERO_BUBBLE])
@pytest.mark.parametrize("grid", [(2, 2, 1), (1, 2, 2), (1, 4, 1)])
@pytest.mark.parametrize("extra_flags", ["", UNTIED, "--checkpoint-activations --checkpoint-num-layers 3"])
def test_every_chunked_schedule_equals_single_process(
    grid: tuple[int, int, int], schedule: str, extra_flags: str
) -> None:
    check_fp64(compare_layout(*grid, 4, f"--fp64 --num-layers 8 {CHUNKS} {extra_flags}", schedule=schedule))


@pytest.mark.slow
def test_sharded_weights_are_gathered_for_chunked_head() -> None:
    for stage in (2, 3):
        extra = f"--fp64 {CHUNKS} {UNTIED}"
        ranks = trace_layout(2, 1, 2, *split_global_batch(2, 4), f"{extra} --zero-stage {stage}")
        check_fp64(compare(trace_one_process(*split_global_batch(1, 4), extra), ranks))

"""A loss in chunks trains the same model in every layout and schedule, to the bit of one process where others do."""

from __future__ import annotations

import pytest

from megatron.training.parity import compare
from tests.helpers.layouts import batches, check_fp64, difference, serial, traces
from tests.parity.test_schedules import check_same_bits

CHUNKS = "--loss-chunk-tokens 5"
UNTIED = "--untie-embeddings-and-output-weights"
ZERO_BUBBLE = "--pipeline-schedule zb-h1"


def test_a_2_by_2_layout_with_chunks_trains_as_one_process_with_whole_logits() -> None:
    """Row E01: tied tables on two stages, gradients put off, layers recomputed."""
    found = traces(2, 2, 1, *batches(1, 4), f"--fp64 {CHUNKS} --checkpoint-activations {ZERO_BUBBLE}")
    check_fp64(compare(serial(*batches(1, 4)), found))


@pytest.mark.slow
def test_a_pipeline_and_one_process_with_chunks_differ_in_no_bit() -> None:
    """Row E10: fp32, untied, clipping off, evaluated losses too."""
    extra = f"--fp32 {UNTIED} {CHUNKS}"
    one = traces(1, 1, 1, 4, 4, extra, eval_every=3)
    for schedule in ("", ZERO_BUBBLE):
        check_same_bits(one, traces(1, 2, 1, 4, 4, f"{extra} {schedule}", eval_every=3))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["", "--pipeline-schedule gpipe", "--pipeline-chunks 2", ZERO_BUBBLE])
@pytest.mark.parametrize("grid", [(2, 2, 1), (1, 2, 2), (1, 4, 1)])
@pytest.mark.parametrize("more", ["", UNTIED, "--checkpoint-activations --checkpoint-num-layers 3"])
def test_every_schedule_with_chunks_trains_the_model_of_one_process(
    grid: tuple[int, int, int], schedule: str, more: str
) -> None:
    check_fp64(difference(*grid, 4, f"--fp64 --num-layers 8 {CHUNKS} {more}", schedule=schedule))


@pytest.mark.slow
def test_cut_weights_are_whole_when_the_head_reads_them() -> None:
    for stage in (2, 3):
        extra = f"--fp64 {CHUNKS} {UNTIED}"
        found = traces(2, 1, 2, *batches(2, 4), f"{extra} --zero-stage {stage}")
        check_fp64(compare(serial(*batches(1, 4), extra), found))

"""``--sequence-parallel`` trains the model of one process: every family, layout, schedule and ZeRO stage."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from megatron.training.parity import Trace, compare
from tds.p2p.packed_layout import PackedLayout
from tests.helpers import t5_runs
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import (
    SEQ,
    check_fp64,
    compare_layout,
    make_flags,
    split_global_batch,
    trace_layout,
    trace_one_process,
    trace_rank,
)
from tests.parity import bert_runs, llama_runs, mpt_runs
from tests.parity.test_schedules import INTERLEAVED, SCHEDULES, UNTIED, ZERO_BUBBLE
from tests.parity.test_zero import assert_same_bits

SEQUENCE_PARALLEL = "--sequence-parallel"
DROPOUT = "--fp64 --clip-grad 0.5 --attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
LAYOUTS = [(2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1)]
T5_VARIANT = f"{t5_runs.VARIANTS['learned']} --dec-seq-length 8 --reset-attention-mask"
"""The variant with all that T5 has of whole weights: positions, biases, norms that shift; documents are apart."""
FAMILIES = {
    "llama": (llama_runs.RUNS, list(llama_runs.VARIANTS.values())),
    "mpt": (mpt_runs.RUNS, list(mpt_runs.VARIANTS.values())),
    "bert": (bert_runs.RUNS, [flags.removeprefix("--fp64") for flags in bert_runs.VARIANTS.values()]),
    "t5": (t5_runs.RUNS, [f"{flags} --dec-seq-length 16" for flags in t5_runs.VARIANTS.values()]),
}


def trace_message_bytes(rank: int, argv: list[str], size: int, steps: int) -> tuple[Trace, set[int]]:
    """Return what a rank saw, and the bytes of the messages that it sent to other stages."""
    message_bytes: set[int] = set()
    pack = PackedLayout.pack

    def recording_pack(layout: PackedLayout, tensors: Any) -> Any:
        message_bytes.add(layout.num_bytes)
        return pack(layout, tensors)

    PackedLayout.pack = recording_pack  # type: ignore[method-assign]
    return trace_rank(rank, argv, size, steps, 0), message_bytes


@pytest.mark.slow  # Qwen 3 in such a layout: test_modern.py; messages: tests/tds/p2p/test_tensor_group.py
def test_sequence_parallel_pipeline_equals_single_process() -> None:
    """Rows E01, E04, E06; the weights' gradients are put off, and inputs of layers wait as parts."""
    extra = "--fp64 --clip-grad 0.5"
    micro, gas = split_global_batch(1, 4)
    argv = make_flags(
        2,
        2,
        micro_batch_size=micro,
        gas=gas,
        extra=f"{extra} {SEQUENCE_PARALLEL} {ZERO_BUBBLE} --checkpoint-activations",
    )
    results = run_ranks(4, trace_message_bytes, argv, 4, 2)
    check_fp64(compare(trace_one_process(micro, gas, extra, steps=2), [trace for trace, _ in results]))
    expected_bytes = SEQ // 2 * micro * 32 * 8
    assert all(message_bytes == {expected_bytes} for _, message_bytes in results), (
        "hidden states and their gradients alone, half of them"
    )


def test_t5_gathers_encoder_output_on_every_reading_stage() -> None:
    """Four virtual stages, so that the decoder is cut, too; masks, tables and positions are those of one process."""
    check_fp64(t5_runs.RUNS.compare_layout(2, 2, 1, f"{DROPOUT} {T5_VARIANT}", 2, f"{SEQUENCE_PARALLEL} {INTERLEAVED}"))


def test_gradient_shards_are_reduced_over_replicas_and_tensor_ranks() -> None:
    check_fp64(compare_layout(2, 1, 2, 2, "--fp64 --clip-grad 0.5", f"{SEQUENCE_PARALLEL} --zero-stage 2", steps=2))


def alternate_family_variants() -> list[tuple[str, int, int, int, int]]:
    """Return every family in every layout, of whose variants each second one takes its turn there."""
    assert all(len(variants) > 1 for _, variants in FAMILIES.values())
    return [
        (name, variant_idx, *layout)
        for name, (_, variants) in FAMILIES.items()
        for variant_idx, (layout_idx, layout) in product(range(len(variants)), enumerate(LAYOUTS))
        if (variant_idx + layout_idx) % 2 == 0
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "variant_idx", "tensor", "pipe", "data"), alternate_family_variants())
def test_every_family_equals_single_process_in_every_layout(
    family: str, variant_idx: int, tensor: int, pipe: int, data: int
) -> None:
    runs, variants = FAMILIES[family]
    check_fp64(runs.compare_layout(tensor, pipe, data, f"{DROPOUT} {variants[variant_idx]}", 3, SEQUENCE_PARALLEL))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_gpt2_equals_single_process_for_20_steps(tensor: int, pipe: int, data: int) -> None:
    check_fp64(compare_layout(tensor, pipe, data, 2, DROPOUT, SEQUENCE_PARALLEL, steps=20))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "extra"), product(SCHEDULES, ("", UNTIED, "--checkpoint-activations")))
def test_every_schedule_equals_single_process(schedule: str, extra: str) -> None:
    check_fp64(compare_layout(2, 2, 1, 4, f"--fp64 {extra}", f"{SEQUENCE_PARALLEL} {schedule}", steps=3))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*SCHEDULES[:3], "--pipeline-split-rank 1"])
@pytest.mark.parametrize("variant", t5_runs.VARIANTS)
def test_every_t5_schedule_equals_single_process(variant: str, schedule: str) -> None:
    extra = f"--fp64 {t5_runs.VARIANTS[variant]} --dec-seq-length 16"
    check_fp64(t5_runs.RUNS.compare_layout(2, 2, 1, extra, 3, f"{SEQUENCE_PARALLEL} {schedule}"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["--fp32", "--bf16"])
def test_zero_stages_are_bitwise_stage_0(stage: int, precision: str) -> None:
    micro, gas = split_global_batch(2, 1)
    extra = f"{precision} --clip-grad 0.5 {SEQUENCE_PARALLEL}"
    plain, sharded = (
        trace_layout(2, 1, 2, micro, gas, f"{extra}{zero_flag}", steps=3)
        for zero_flag in ("", f" --zero-stage {stage}")
    )
    if stage == 1:
        assert_same_bits(plain, sharded)
    for plain_trace, sharded_trace in zip(plain, sharded, strict=True):
        assert plain_trace.losses == pytest.approx(sharded_trace.losses, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [2, 4])
def test_fp32_stays_within_measured_floor(tensor: int) -> None:
    """Row E02."""
    diff = compare_layout(tensor, 1, 1, 2, "--fp32 --clip-grad 0.5", SEQUENCE_PARALLEL, steps=6)
    assert diff.first_loss <= 2e-6
    assert diff.loss <= 5e-5
    assert diff.gradient <= 3e-6, diff.worst_gradient
    assert diff.first_norm <= 1e-6

"""``--context-parallel-size`` trains the model of one process: every family, layout, schedule and ZeRO stage."""

from __future__ import annotations

import pytest

from tests.helpers.layouts import check_fp64, compare_layout, split_global_batch, trace_layout
from tests.parity import bert_runs, llama_runs, modern_runs, mpt_runs
from tests.parity.test_schedules import INTERLEAVED, SCHEDULES
from tests.parity.test_zero import assert_same_bits

DOCUMENT_FLAGS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
DROPOUT = "--fp64 --clip-grad 0.5 --attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
LAYOUTS = [
    (1, 1, 1, 2), (1, 1, 1, 4), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (2, 2, 1, 2), (1, 2, 2, 2), (2, 1, 2, 2),
    (1, 2, 1, 4), (2, 1, 1, 4),
]  # fmt: skip
"""(tensor, pipe, data, context), the last five of 8 ranks."""
FAMILIES = {
    "llama": (llama_runs.RUNS, list(llama_runs.VARIANTS.values())),
    "mpt": (mpt_runs.RUNS, list(mpt_runs.VARIANTS.values())),
    "bert": (bert_runs.RUNS, [flags.removeprefix("--fp64") for flags in bert_runs.VARIANTS.values()]),
    **{name: (runs, [modern_runs.EXTRA.removeprefix("--fp64")]) for name, runs in modern_runs.RUNS.items()},
}


def test_documents_across_ranks_with_zero_2_equal_single_process() -> None:
    """Gradients are summed over data x context, each part of them on one of these ranks."""
    check_fp64(
        compare_layout(1, 1, 2, 1, f"--fp64 --clip-grad 0.5 {DOCUMENT_FLAGS}", "--zero-stage 2", context=2, steps=2)
    )


HIERARCHICAL = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
BY_LAYER = "--cp-comm-type a2a a2a+p2p all_gather a2a --hierarchical-context-parallel-sizes 2 2"


@pytest.mark.slow
@pytest.mark.parametrize("comm_flags", [HIERARCHICAL, BY_LAYER])
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ((1, 1, 1), ""),
        ((1, 2, 1), "--pipeline-schedule zb-h1"),
        ((1, 1, 2), "--zero-stage 3 --checkpoint-activations"),
        ((1, 1, 2), "--zero-stage 1"),
        ((1, 2, 1), INTERLEAVED),
    ],
)
@pytest.mark.parametrize(
    "extra", [f"--fp64 --clip-grad 0.5 {DOCUMENT_FLAGS}", f"{DROPOUT} {DOCUMENT_FLAGS}", "--fp64 --clip-grad 0.5"]
)
def test_hierarchical_form_and_types_by_layer_equal_single_process(
    layout: tuple[int, int, int], options: str, extra: str, comm_flags: str
) -> None:
    check_fp64(compare_layout(*layout, 2, extra, f"{comm_flags} {options}", context=4, steps=3))


@pytest.mark.slow
def test_hierarchical_form_with_tensor_ranks_equals_single_process() -> None:
    extra = f"--fp64 --clip-grad 0.5 --num-attention-heads 8 --hidden-size 64 {DOCUMENT_FLAGS}"
    check_fp64(compare_layout(2, 1, 1, 2, extra, f"{HIERARCHICAL} --sequence-parallel", context=4, steps=3))


@pytest.mark.slow
def test_pipeline_dropout_equals_single_process() -> None:
    """Two chunks on each stage, recomputed; masks belong to places in the whole sequence."""
    check_fp64(compare_layout(1, 2, 1, 2, DROPOUT, f"{INTERLEAVED} --checkpoint-activations", context=2, steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("comm_flag", ["", "--cp-comm-type a2a"])
@pytest.mark.parametrize(
    "extra", ["--fp64 --clip-grad 0.5", f"--fp64 --clip-grad 0.5 {DOCUMENT_FLAGS}", f"{DROPOUT} {DOCUMENT_FLAGS}"]
)
@pytest.mark.parametrize(("tensor", "pipe", "data", "context"), LAYOUTS)
def test_gpt2_equals_single_process_in_every_layout(
    tensor: int, pipe: int, data: int, context: int, extra: str, comm_flag: str
) -> None:
    if comm_flag and tensor * context > 4:
        pytest.skip("four heads are for four ranks")
    sequence = "--sequence-parallel" if tensor > 1 and tensor * context < 8 else ""
    check_fp64(compare_layout(tensor, pipe, data, 2, extra, f"{comm_flag} {sequence}", context=context, steps=4))


def test_bert_with_dropout_equals_single_process() -> None:
    """Attention to all keys without a mask, with dropout."""
    runs, variants = FAMILIES["bert"]
    check_fp64(runs.compare_layout(1, 1, 1, f"{DROPOUT} {variants[1]}", 2, context=2))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data", "context"), LAYOUTS[:5])
@pytest.mark.parametrize(
    ("family", "variant_idx"),
    [(name, variant_idx) for name, (_, flags) in FAMILIES.items() for variant_idx in range(len(flags))],
)
def test_every_family_equals_single_process(
    family: str, variant_idx: int, tensor: int, pipe: int, data: int, context: int
) -> None:
    runs, variants = FAMILIES[family]
    check_fp64(runs.compare_layout(tensor, pipe, data, f"{DROPOUT} {variants[variant_idx]}", 3, context=context))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data", "context"), LAYOUTS[:5])
@pytest.mark.parametrize("comm_flag", ["", "--cp-comm-type a2a"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_documents_without_mask_equal_single_process(
    family: str, comm_flag: str, tensor: int, pipe: int, data: int, context: int
) -> None:
    runs, variants = FAMILIES[family]
    if comm_flag and tensor * context > 2:
        pytest.skip("two groups of keys are for two ranks")
    extra = f"--fp64 --clip-grad 0.5 {runs.document_flags} {variants[-1]}"
    check_fp64(runs.compare_layout(tensor, pipe, data, extra, 3, comm_flag, context=context))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("extra", ["", "--checkpoint-activations", "--recompute-granularity selective"])
def test_every_schedule_equals_single_process(schedule: str, extra: str) -> None:
    check_fp64(compare_layout(1, 2, 1, 4, f"--fp64 {DOCUMENT_FLAGS} {extra}", schedule, context=2, steps=3))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stages_are_bitwise_stage_0(stage: int) -> None:
    micro, gas = split_global_batch(2, 1)
    extra = "--fp32 --clip-grad 0.5"
    plain, sharded = (
        trace_layout(1, 1, 2, micro, gas, f"{extra}{zero_flag}", steps=3, context=2)
        for zero_flag in ("", f" --zero-stage {stage}")
    )
    if stage == 1:
        assert_same_bits(plain, sharded)
    for plain_trace, sharded_trace in zip(plain, sharded, strict=True):
        assert plain_trace.losses == pytest.approx(sharded_trace.losses, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("context", [2, 4])
def test_fp32_stays_within_measured_floor(context: int) -> None:
    """Row E02."""
    diff = compare_layout(1, 1, 1, 2, "--fp32 --clip-grad 0.5", context=context, steps=6)
    assert diff.first_loss <= 2e-6
    assert diff.loss <= 5e-5
    assert diff.gradient <= 3e-6, diff.worst_gradient
    assert diff.first_norm <= 1e-6

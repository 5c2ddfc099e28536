"""``--context-parallel-size`` trains the model of one process: every family, layout, schedule and ZeRO stage."""

from __future__ import annotations

import pytest

from tests.helpers.layouts import batches, check_fp64, difference, traces
from tests.parity import bert_runs, llama_runs, modern_runs, mpt_runs
from tests.parity.test_schedules import INTERLEAVED, OTHERS
from tests.parity.test_zero import assert_same_bits

APART = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
DROPPED = "--fp64 --clip-grad 0.5 --attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
LAYOUTS = [
    (1, 1, 1, 2), (1, 1, 1, 4), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (2, 2, 1, 2), (1, 2, 2, 2), (2, 1, 2, 2),
    (1, 2, 1, 4), (2, 1, 1, 4),
]  # fmt: skip
"""(tensor, pipe, data, context), the last five of 8 ranks."""
FAMILIES = {
    "llama": (llama_runs.RUNS, list(llama_runs.VARIANTS.values())),
    "mpt": (mpt_runs.RUNS, list(mpt_runs.VARIANTS.values())),
    "bert": (bert_runs.RUNS, [each.removeprefix("--fp64") for each in bert_runs.VARIANTS.values()]),
    **{name: (runs, [modern_runs.EXTRA.removeprefix("--fp64")]) for name, runs in modern_runs.RUNS.items()},
}


def test_documents_straddle_ranks_and_replicas_share_states() -> None:
    """Gradients are summed over data x context, each part of them on one of these ranks."""
    check_fp64(difference(1, 1, 2, 1, f"--fp64 --clip-grad 0.5 {APART}", "--zero-stage 2", context=2, steps=2))


@pytest.mark.slow
def test_a_pipeline_drops_what_one_process_drops() -> None:
    """Two chunks on each stage, recomputed; masks belong to places in the whole sequence."""
    check_fp64(difference(1, 2, 1, 2, DROPPED, f"{INTERLEAVED} --checkpoint-activations", context=2, steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "--cp-comm-type a2a"])
@pytest.mark.parametrize("extra", ["--fp64 --clip-grad 0.5", f"--fp64 --clip-grad 0.5 {APART}", f"{DROPPED} {APART}"])
@pytest.mark.parametrize(("tensor", "pipe", "data", "context"), LAYOUTS)
def test_gpt2_in_every_layout(tensor: int, pipe: int, data: int, context: int, extra: str, how: str) -> None:
    if how and tensor * context > 4:
        pytest.skip("four heads are for four ranks")
    sequence = "--sequence-parallel" if tensor > 1 and tensor * context < 8 else ""
    check_fp64(difference(tensor, pipe, data, 2, extra, f"{how} {sequence}", context=context, steps=4))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data", "context"), LAYOUTS[:5])
@pytest.mark.parametrize(
    ("family", "variant"), [(name, number) for name, (_, each) in FAMILIES.items() for number in range(len(each))]
)
def test_every_family(family: str, variant: int, tensor: int, pipe: int, data: int, context: int) -> None:
    runs, variants = FAMILIES[family]
    check_fp64(runs.difference(tensor, pipe, data, f"{DROPPED} {variants[variant]}", 3, context=context))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data", "context"), LAYOUTS[:5])
@pytest.mark.parametrize("how", ["", "--cp-comm-type a2a"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_documents_of_every_family_without_a_mask(
    family: str, how: str, tensor: int, pipe: int, data: int, context: int
) -> None:
    runs, variants = FAMILIES[family]
    if how and tensor * context > 2:
        pytest.skip("two groups of keys are for two ranks")
    extra = f"--fp64 --clip-grad 0.5 {runs.documents} {variants[-1]}"
    check_fp64(runs.difference(tensor, pipe, data, extra, 3, how, context=context))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", OTHERS)
@pytest.mark.parametrize("extra", ["", "--checkpoint-activations", "--recompute-granularity selective"])
def test_every_schedule(schedule: str, extra: str) -> None:
    check_fp64(difference(1, 2, 1, 4, f"--fp64 {APART} {extra}", schedule, context=2, steps=3))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stages_give_the_bits_of_stage_0(stage: int) -> None:
    micro, gas = batches(2, 1)
    extra = "--fp32 --clip-grad 0.5"
    plain, cut = (
        traces(1, 1, 2, micro, gas, f"{extra}{zero}", steps=3, context=2) for zero in ("", f" --zero-stage {stage}")
    )
    if stage == 1:
        assert_same_bits(plain, cut)
    for one, other in zip(plain, cut, strict=True):
        assert one.losses == pytest.approx(other.losses, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("context", [2, 4])
def test_fp32_is_at_the_floor(context: int) -> None:
    """Row E02."""
    found = difference(1, 1, 1, 2, "--fp32 --clip-grad 0.5", context=context, steps=6)
    assert found.first_loss <= 2e-6
    assert found.loss <= 5e-5
    assert found.gradient <= 3e-6, found.worst
    assert found.first_norm <= 1e-6

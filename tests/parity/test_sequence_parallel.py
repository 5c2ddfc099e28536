"""``--sequence-parallel`` trains the model of one process: every family, layout, schedule and ZeRO stage."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from megatron.training.parity import Trace, compare
from tds.p2p.packed_layout import PackedLayout
from tests.helpers import t5_runs
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import SEQ, batches, check_fp64, difference, flags, serial, trace_rank, traces
from tests.parity import bert_runs, llama_runs, mpt_runs
from tests.parity.test_schedules import INTERLEAVED, OTHERS, UNTIED, ZERO_BUBBLE
from tests.parity.test_zero import assert_same_bits

SEQUENCE = "--sequence-parallel"
DROPPED = "--fp64 --clip-grad 0.5 --attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
LAYOUTS = [(2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1)]
OF_T5 = f"{t5_runs.VARIANTS['learned']} --dec-seq-length 8 --reset-attention-mask"
"""The variant with all that T5 has of whole weights: positions, biases, norms that shift; documents are apart."""
FAMILIES = {
    "llama": (llama_runs.RUNS, list(llama_runs.VARIANTS.values())),
    "mpt": (mpt_runs.RUNS, list(mpt_runs.VARIANTS.values())),
    "bert": (bert_runs.RUNS, [each.removeprefix("--fp64") for each in bert_runs.VARIANTS.values()]),
    "t5": (t5_runs.RUNS, [f"{each} --dec-seq-length 16" for each in t5_runs.VARIANTS.values()]),
}


def traced_with_messages(rank: int, argv: list[str], size: int, steps: int) -> tuple[Trace, set[int]]:
    """Return what a rank saw, and the bytes of the messages that it sent to other stages."""
    sizes: set[int] = set()
    pack = PackedLayout.pack

    def noting(layout: PackedLayout, tensors: Any) -> Any:
        sizes.add(layout.num_bytes)
        return pack(layout, tensors)

    PackedLayout.pack = noting  # type: ignore[method-assign]
    return trace_rank(rank, argv, size, steps, 0), sizes


@pytest.mark.slow  # Qwen 3 in such a layout: test_modern.py; messages: tests/tds/p2p/test_tensor_group.py
def test_a_pipeline_with_the_sequence_cut_equals_one_process_and_sends_parts() -> None:
    """Rows E01, E04, E06; the weights' gradients are put off, and inputs of layers wait as parts."""
    extra = "--fp64 --clip-grad 0.5"
    micro, gas = batches(1, 4)
    argv = flags(2, 2, micro=micro, gas=gas, extra=f"{extra} {SEQUENCE} {ZERO_BUBBLE} --checkpoint-activations")
    found = run_ranks(4, traced_with_messages, argv, 4, 2)
    check_fp64(compare(serial(micro, gas, extra, steps=2), [trace for trace, _ in found]))
    part = SEQ // 2 * micro * 32 * 8
    assert all(sizes == {part} for _, sizes in found), "hidden states and their gradients alone, half of them"


def test_t5_gathers_the_encoders_output_on_every_stage_that_reads_it() -> None:
    """Four pieces, so that the decoder is cut as well; masks, tables and positions are those of one process."""
    check_fp64(t5_runs.RUNS.difference(2, 2, 1, f"{DROPPED} {OF_T5}", 2, f"{SEQUENCE} {INTERLEAVED}"))


def test_parts_of_gradients_are_summed_over_replicas_and_over_tensor_ranks() -> None:
    check_fp64(difference(2, 1, 2, 2, "--fp64 --clip-grad 0.5", f"{SEQUENCE} --zero-stage 2", steps=2))


def families_by_turns() -> list[tuple[str, int, int, int, int]]:
    """Return every family in every layout, of whose variants each second one takes its turn there."""
    assert all(len(variants) > 1 for _, variants in FAMILIES.values())
    return [
        (name, number, *layout)
        for name, (_, variants) in FAMILIES.items()
        for number, (turn, layout) in product(range(len(variants)), enumerate(LAYOUTS))
        if (number + turn) % 2 == 0
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "variant", "tensor", "pipe", "data"), families_by_turns())
def test_every_family_in_every_layout(family: str, variant: int, tensor: int, pipe: int, data: int) -> None:
    runs, variants = FAMILIES[family]
    check_fp64(runs.difference(tensor, pipe, data, f"{DROPPED} {variants[variant]}", 3, SEQUENCE))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_gpt2_for_20_steps(tensor: int, pipe: int, data: int) -> None:
    check_fp64(difference(tensor, pipe, data, 2, DROPPED, SEQUENCE, steps=20))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "extra"), product(OTHERS, ("", UNTIED, "--checkpoint-activations")))
def test_every_schedule(schedule: str, extra: str) -> None:
    check_fp64(difference(2, 2, 1, 4, f"--fp64 {extra}", f"{SEQUENCE} {schedule}", steps=3))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*OTHERS[:3], "--pipeline-split-rank 1"])
@pytest.mark.parametrize("variant", t5_runs.VARIANTS)
def test_every_schedule_of_t5(variant: str, schedule: str) -> None:
    extra = f"--fp64 {t5_runs.VARIANTS[variant]} --dec-seq-length 16"
    check_fp64(t5_runs.RUNS.difference(2, 2, 1, extra, 3, f"{SEQUENCE} {schedule}"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["--fp32", "--bf16"])
def test_zero_stages_give_the_bits_of_stage_0(stage: int, precision: str) -> None:
    micro, gas = batches(2, 1)
    extra = f"{precision} --clip-grad 0.5 {SEQUENCE}"
    plain, cut = (traces(2, 1, 2, micro, gas, f"{extra}{zero}", steps=3) for zero in ("", f" --zero-stage {stage}"))
    if stage == 1:
        assert_same_bits(plain, cut)
    for one, other in zip(plain, cut, strict=True):
        assert one.losses == pytest.approx(other.losses, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [2, 4])
def test_fp32_is_at_the_floor(tensor: int) -> None:
    """Row E02."""
    found = difference(tensor, 1, 1, 2, "--fp32 --clip-grad 0.5", SEQUENCE, steps=6)
    assert found.first_loss <= 2e-6
    assert found.loss <= 5e-5
    assert found.gradient <= 3e-6, found.worst
    assert found.first_norm <= 1e-6

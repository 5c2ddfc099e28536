"""BERT in every layout gives the losses, every gradient, the norms and the weights of one process."""

from __future__ import annotations

import pytest

from tests.helpers.layouts import LAYOUTS, check_fp64
from tests.parity.bert_runs import RUNS, VARIANTS
from tests.parity.test_layouts import assert_same_gradients
from tests.parity.test_zero import assert_same_bits

QUICK = {("pairs", 2, 1, 1)}
SCHEDULES = [
    "--pipeline-schedule gpipe",
    "--pipeline-schedule zb-h1",
    "--pipeline-schedule interleaved --pipeline-chunks 2",
]
FP32 = "--fp32 --clip-grad 0"


@pytest.mark.parametrize(
    ("variant", "tensor", "pipe", "data"),
    [
        pytest.param(variant, *grid, marks=() if (variant, *grid) in QUICK else pytest.mark.slow)
        for variant in VARIANTS
        for grid in LAYOUTS
    ],
)
def test_every_layout_equals_single_process(variant: str, tensor: int, pipe: int, data: int) -> None:
    steps = 3 if (variant, tensor, pipe, data) in QUICK else 20 if variant == "pairs" else 5
    check_fp64(RUNS.compare_layout(tensor, pipe, data, VARIANTS[variant], steps))


@pytest.mark.slow
def test_micro_batch_size_does_not_change_loss() -> None:
    """Row E11: masked tokens and samples are counted over the step, however it is cut."""
    check_fp64(RUNS.compare_layout(1, 1, 1, VARIANTS["pairs"], 3, gas=8))


@pytest.mark.parametrize("schedule", [SCHEDULES[0], *[pytest.param(s, marks=pytest.mark.slow) for s in SCHEDULES[1:]]])
def test_schedules_are_bitwise_equal_except_word_embedding(schedule: str) -> None:
    """Rows E04 and E10; the table is in two places, whose gradients are added up in another order."""
    reference, ranks = RUNS.trace_layout(1, 1, 1, FP32, 1)[0], RUNS.trace_layout(1, 2, 1, f"{FP32} {schedule}", 1)
    assert [trace.losses for trace in ranks] == [reference.losses] * 2
    for trace in ranks:
        for name, (shard, gradient) in trace.gradients.items():
            relative_diff = float(
                (gradient - shard.narrow(reference.gradients[name][1])).norm() / reference.gradients[name][1].norm()
            )
            assert relative_diff <= (3e-7 if name == "embedding.word.weight" else 0.0), name


@pytest.mark.parametrize(
    ("tensor", "pipe", "num_layers"),
    [
        (1, 1, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 1))),
    ],
)
def test_recompute_with_dropout_is_bitwise_equal(tensor: int, pipe: int, num_layers: int) -> None:
    """Row E08."""
    dropout_flags = f"{FP32} --attention-dropout 0.1 --hidden-dropout 0.1"
    extra = f"{dropout_flags} --checkpoint-activations --checkpoint-num-layers {num_layers}"
    for plain, recomputed in zip(
        RUNS.trace_layout(tensor, pipe, 1, dropout_flags, 2), RUNS.trace_layout(tensor, pipe, 1, extra, 2), strict=True
    ):
        assert plain.losses == recomputed.losses
        assert_same_gradients(plain, recomputed)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_fp32_stays_within_measured_floor(tensor: int, pipe: int, data: int) -> None:
    """Row E02."""
    RUNS.check_fp32(tensor, pipe, data)


@pytest.mark.slow
def test_zero_1_is_bitwise_zero_0() -> None:
    """Row E07."""
    for layout in ((1, 1, 2), (2, 1, 2)):
        assert_same_bits(
            *(RUNS.trace_layout(*layout, f"--fp32 {zero_flags}", 6) for zero_flags in ("", "--zero-stage 1"))
        )


@pytest.mark.parametrize(
    "flag",
    [
        "--bert-no-binary-head",
        "--whole-word-masking",
        *(
            pytest.param(flag, marks=pytest.mark.slow)
            for flag in ("--mask-prob 0.3", "--short-seq-prob 0", "--activation gated-gelu")
        ),
    ],
)
def test_each_flag_changes_model_or_batch(flag: str) -> None:
    RUNS.check_flag_changes_loss(flag)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_layout_independent_dropout_equals_single_process(tensor: int, pipe: int, data: int) -> None:
    """Row E12."""
    extra = "--fp64 --attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
    check_fp64(RUNS.compare_layout(tensor, pipe, data, extra, 3))


def test_pipeline_evaluation_equals_single_process_and_keeps_state() -> None:
    """Row E20."""
    plain = RUNS.trace_layout(1, 1, 1, VARIANTS["pairs"], 3, 4, 2)[0]
    ranks = RUNS.trace_layout(1, 2, 1, VARIANTS["pairs"], 3, 4, 2)
    assert all(abs(trace.eval_losses[0] - plain.eval_losses[0]) <= 1e-12 for trace in ranks)
    assert plain.losses == RUNS.trace_layout(1, 1, 1, VARIANTS["pairs"], 3)[0].losses

"""BERT in every layout gives the losses, every gradient, the norms and the weights of one process."""

from __future__ import annotations

import pytest

from tests.helpers.layouts import LAYOUTS, check_fp64
from tests.parity.bert_runs import RUNS, VARIANTS
from tests.parity.test_layouts import assert_same_gradients
from tests.parity.test_zero import assert_same_bits

SHORT = {("pairs", 2, 1, 1)}
SCHEDULES = [
    "--pipeline-schedule gpipe",
    "--pipeline-schedule zb-h1",
    "--pipeline-schedule interleaved --pipeline-chunks 2",
]
FP32 = "--fp32 --clip-grad 0"


@pytest.mark.parametrize(
    ("variant", "tensor", "pipe", "data"),
    [
        pytest.param(variant, *grid, marks=() if (variant, *grid) in SHORT else pytest.mark.slow)
        for variant in VARIANTS
        for grid in LAYOUTS
    ],
)
def test_every_layout_equals_one_process(variant: str, tensor: int, pipe: int, data: int) -> None:
    steps = 3 if (variant, tensor, pipe, data) in SHORT else 20 if variant == "pairs" else 5
    check_fp64(RUNS.difference(tensor, pipe, data, VARIANTS[variant], steps))


@pytest.mark.slow
def test_micro_batches_of_another_size_give_the_same_sum_of_two_means() -> None:
    """Row E11: masked tokens and samples are counted over the step, however it is cut."""
    check_fp64(RUNS.difference(1, 1, 1, VARIANTS["pairs"], 3, gas=8))


@pytest.mark.parametrize("schedule", [SCHEDULES[0], *[pytest.param(s, marks=pytest.mark.slow) for s in SCHEDULES[1:]]])
def test_schedules_differ_from_one_process_in_no_bit_but_for_the_word_table(schedule: str) -> None:
    """Rows E04 and E10; the table is in two places, whose gradients are added up in another order."""
    first, ranks = RUNS.traces(1, 1, 1, FP32, 1)[0], RUNS.traces(1, 2, 1, f"{FP32} {schedule}", 1)
    assert [trace.losses for trace in ranks] == [first.losses] * 2
    for trace in ranks:
        for name, (shard, part) in trace.gradients.items():
            apart = float((part - shard.cut(first.gradients[name][1])).norm() / first.gradients[name][1].norm())
            assert apart <= (3e-7 if name == "embedding.word.weight" else 0.0), name


@pytest.mark.parametrize(
    ("tensor", "pipe", "every"),
    [
        (1, 1, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 1))),
    ],
)
def test_recompute_changes_no_bit_with_dropout_on(tensor: int, pipe: int, every: int) -> None:
    """Row E08."""
    dropped = f"{FP32} --attention-dropout 0.1 --hidden-dropout 0.1"
    extra = f"{dropped} --checkpoint-activations --checkpoint-num-layers {every}"
    for plain, again in zip(
        RUNS.traces(tensor, pipe, 1, dropped, 2), RUNS.traces(tensor, pipe, 1, extra, 2), strict=True
    ):
        assert plain.losses == again.losses
        assert_same_gradients(plain, again)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_fp32_is_at_the_floor(tensor: int, pipe: int, data: int) -> None:
    """Row E02."""
    RUNS.check_floor(tensor, pipe, data)


@pytest.mark.slow
def test_replicas_that_share_train_the_model_of_those_that_do_not() -> None:
    """Row E07."""
    for layout in ((1, 1, 2), (2, 1, 2)):
        assert_same_bits(*(RUNS.traces(*layout, f"--fp32 {zero}", 6) for zero in ("", "--zero-stage 1")))


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
def test_each_flag_makes_another_model_or_batch(flag: str) -> None:
    RUNS.check_acts(flag)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_dropout_that_knows_no_layout_gives_the_same_everywhere(tensor: int, pipe: int, data: int) -> None:
    """Row E12."""
    extra = "--fp64 --attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
    check_fp64(RUNS.difference(tensor, pipe, data, extra, 3))


def test_evaluation_in_a_pipeline_is_that_of_one_process_and_changes_nothing() -> None:
    """Row E20."""
    plain = RUNS.traces(1, 1, 1, VARIANTS["pairs"], 3, 4, 2)[0]
    ranks = RUNS.traces(1, 2, 1, VARIANTS["pairs"], 3, 4, 2)
    assert all(abs(trace.eval_losses[0] - plain.eval_losses[0]) <= 1e-12 for trace in ranks)
    assert plain.losses == RUNS.traces(1, 1, 1, VARIANTS["pairs"], 3)[0].losses

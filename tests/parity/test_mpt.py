"""MPT in every layout of 1, 2 and 4 ranks: losses, gradients and norms of one process, schedules and recompute."""

from __future__ import annotations

from itertools import product

import pytest

from tests.parity.layouts import LAYOUTS, check_fp64
from tests.parity.mpt_runs import VARIANTS, difference, traces
from tests.parity.test_layouts import assert_same_gradients
from tests.parity.test_schedules import GRIDS, INTERLEAVED, OTHERS, UNTIED, check_same_bits
from tests.parity.test_zero import assert_same_bits

RATES = "--attention-dropout 0.1 --hidden-dropout 0.1"
DROPPED = f"--fp64 --clip-grad 0.5 {RATES} --layout-independent-dropout"
SHORT = [((2, 2, 1), "documents"), ((1, 2, 2), "clipped")]
EVERY = [
    pytest.param(*grid, variant, marks=() if (grid, variant) in SHORT else pytest.mark.slow)
    for grid, variant in product(LAYOUTS, VARIANTS)
]


@pytest.mark.parametrize(("tensor", "pipe", "data", "variant"), EVERY)
def test_fp64_equals_one_process(tensor: int, pipe: int, data: int, variant: str) -> None:
    """Rows E01, E04, E06, E09, E16, E17."""
    check_fp64(difference(tensor, pipe, data, f"--fp64 --clip-grad 0.5 {VARIANTS[variant]}", 3))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_fp64_equals_one_process_for_20_steps(tensor: int, pipe: int, data: int) -> None:
    check_fp64(difference(tensor, pipe, data, "--fp64 --clip-grad 0.5", 20))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_fp32_is_at_the_floor(tensor: int, pipe: int, data: int) -> None:
    """Row E02."""
    found = difference(tensor, pipe, data, "--fp32 --clip-grad 0.5", 6)
    assert found.first_loss <= 2e-6
    assert found.loss <= 5e-5
    assert found.gradient <= 3e-6, found.worst
    assert found.first_norm <= 1e-6


@pytest.mark.parametrize(
    ("pipe", "schedule"),
    [
        pytest.param(pipe, each, marks=() if (pipe, each) == (2, INTERLEAVED) else pytest.mark.slow)
        for pipe, each in product((2, 4), OTHERS)
    ],
)
def test_a_pipeline_is_one_process_and_its_schedules_each_other_to_the_bit(pipe: int, schedule: str) -> None:
    """Rows E03 and E10: fp32, untied, clipping off; documents are apart."""
    extra = f"--fp32 {UNTIED} --num-layers 8 --reset-attention-mask" if pipe == 4 else f"--fp32 {UNTIED}"
    one, other = (traces(1, pipe, 1, f"{extra} {each}", 2, 4, 2) for each in ("", schedule))
    check_same_bits(one, other)
    check_same_bits(other, [*traces(1, 1, 1, extra, 2, 4, 2), *other])


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "schedule"), list(product(GRIDS, OTHERS)))
def test_every_schedule_trains_the_model_of_one_process(grid: tuple[int, int, int], schedule: str) -> None:
    check_fp64(difference(*grid, "--fp64 --num-layers 8 --reset-attention-mask", 3, schedule))


@pytest.mark.parametrize(
    ("tensor", "pipe", "every"),
    [(2, 1, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 1, 2), (1, 2, 1), (2, 2, 1)))],
)
def test_recompute_changes_no_bit(tensor: int, pipe: int, every: int) -> None:
    """Row E08, with the dropout masks drawn again in backward."""
    extra = f"--fp32 {RATES} --reset-attention-mask"
    plain = traces(tensor, pipe, 1, extra, 2)
    recomputed = traces(tensor, pipe, 1, f"{extra} --checkpoint-activations --checkpoint-num-layers {every}", 2)
    assert [t.losses for t in plain] == [t.losses for t in recomputed]
    for one, other in zip(plain, recomputed, strict=True):
        assert_same_gradients(one, other)


@pytest.mark.parametrize(
    ("tensor", "pipe", "data", "schedule"),
    [
        (2, 2, 1, "--checkpoint-activations"),
        *(pytest.param(*grid, "", marks=pytest.mark.slow) for grid in LAYOUTS),
        pytest.param(1, 2, 1, "--pipeline-schedule zb-h1", marks=pytest.mark.slow),
    ],
)
def test_dropout_is_that_of_one_process(tensor: int, pipe: int, data: int, schedule: str) -> None:
    """Row E12."""
    extra = f"{DROPPED} --reset-attention-mask"
    check_fp64(difference(tensor, pipe, data, extra, 3, schedule))
    without = traces(1, 1, 1, "--fp64 --clip-grad 0.5 --reset-attention-mask", 1)[0]
    assert traces(1, 1, 1, extra, 3)[0].losses[0] != without.losses[0]


@pytest.mark.slow
def test_bf16_trains_close_to_fp32_and_equal_in_every_replica() -> None:
    wide, narrow = traces(1, 1, 1, "--fp32", 6)[0], traces(2, 2, 1, "--bf16", 6)
    assert abs(narrow[0].losses[-1] - wide.losses[-1]) < 0.05
    assert len({tuple(t.losses) for t in narrow}) == 1


@pytest.mark.slow
def test_replicas_that_share_train_the_model_of_those_that_do_not() -> None:
    """Row E07."""
    for layout in ((1, 1, 2), (2, 1, 2)):
        assert_same_bits(*(traces(*layout, f"--fp32 --clip-grad 0.5 {zero}", 6) for zero in ("", "--zero-stage 1")))


@pytest.mark.parametrize("flag", ["--reset-attention-mask", "--eod-mask-loss", "--alibi-bias-max 2", "--clip-qkv 0.1"])
def test_each_flag_makes_another_model_or_batch(flag: str) -> None:
    """Layouts are compared with one process, which would not tell of a flag that is lost in both."""
    plain, changed = (traces(1, 1, 1, f"--fp64 {extra}", 1)[0] for extra in ("", flag))
    assert abs(plain.losses[0] - changed.losses[0]) > 1e-6

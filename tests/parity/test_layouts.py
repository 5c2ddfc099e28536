"""Every layout of 1, 2 and 4 ranks gives the loss, every gradient and the gradient norm of one process."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.training.parity import Difference, Trace, compare
from tests.helpers.layouts import LAYOUTS, batches, check_fp64, difference, serial, traces


def check_fp32(found: Difference) -> None:
    """Row E02: the measured floors of fp32."""
    assert found.first_loss <= 2e-6
    assert found.loss <= 5e-5
    assert found.gradient <= 3e-6, found.worst
    assert found.first_norm <= 1e-6


def slow_but(*few: tuple[int, int, int]) -> list[Any]:
    """Return every layout; all but ``few`` are slow."""
    return [pytest.param(*layout, marks=() if layout in few else pytest.mark.slow) for layout in LAYOUTS]


@pytest.mark.parametrize(("tensor", "pipe", "data"), slow_but((2, 2, 1), (1, 2, 2)))
def test_fp64_equals_one_process(tensor: int, pipe: int, data: int, steps: int) -> None:
    check_fp64(difference(tensor, pipe, data, 2, "--fp64 --clip-grad 0.5", steps=steps))


@pytest.mark.parametrize(("tensor", "pipe", "data"), [(4, 1, 1), (1, 4, 1), (1, 1, 4)])
def test_four_ranks_of_one_kind_equal_one_process(tensor: int, pipe: int, data: int) -> None:
    check_fp64(difference(tensor, pipe, data, 2, "--fp64 --clip-grad 0.5"))


@pytest.mark.parametrize(("tensor", "pipe", "data"), slow_but((2, 2, 1)))
def test_fp32_is_at_the_floor(tensor: int, pipe: int, data: int) -> None:
    check_fp32(difference(tensor, pipe, data, 2, "--fp32 --clip-grad 0.5"))


@pytest.mark.parametrize(
    ("layout", "gas"),
    [((1, 2, 2), 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in (((2, 2, 1), 4), ((2, 2, 1), 1)))],
)
def test_accumulation_of_1_and_4_equals_one_process(layout: tuple[int, int, int], gas: int) -> None:
    check_fp64(difference(*layout, gas, "--fp64"))


VARIANTS = {
    "--untie-embeddings-and-output-weights": None,
    "--checkpoint-activations": None,
    "--checkpoint-activations --checkpoint-num-layers 2": None,
    "--num-layers 3": (1, 2, 2),
    "--reset-position-ids --reset-attention-mask --eod-mask-loss": (1, 2, 2),
    "--kv-hidden-size 6 --ff-hidden-size 40 --apply-residual-connection-post-layernorm": (2, 2, 1),
    "--optimizer sgd --lr 0.1 --clip-grad 0.01": (2, 2, 1),
}
"""Flags -> the layout (tensor, pipe, data) of the short run."""


@pytest.mark.parametrize(
    ("extra", "layout"),
    [
        pytest.param(extra, layout, marks=() if layout == quick else pytest.mark.slow)
        for extra, quick in VARIANTS.items()
        for layout in ((2, 2, 1), (1, 2, 2))
    ],
)
def test_variants_equal_one_process(extra: str, layout: tuple[int, int, int]) -> None:
    check_fp64(difference(*layout, 2, f"--fp64 {extra}"))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_fp32_stays_near_for_100_steps(tensor: int, pipe: int, data: int) -> None:
    check_fp32(difference(tensor, pipe, data, 2, "--fp32 --clip-grad 1.0 --train-iters 100", steps=100))


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", "--untie-embeddings-and-output-weights", "--checkpoint-activations"])
@pytest.mark.parametrize("gas", [1, 2, 4])
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_every_layout_with_every_switch(tensor: int, pipe: int, data: int, gas: int, extra: str) -> None:
    check_fp64(difference(tensor, pipe, data, gas, f"--fp64 {extra}", steps=6))


@pytest.mark.parametrize("mask", [pytest.param("", marks=pytest.mark.slow), "--eod-mask-loss"], ids=["", "masked"])
@pytest.mark.parametrize("pipe", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_untied_pipeline_is_bitwise_the_same_in_fp32(pipe: int, mask: str) -> None:
    """Row E03: clipping off, the same micro-batches."""
    extra = f"--fp32 --untie-embeddings-and-output-weights {mask}"
    found = difference(1, pipe, 1, 2, extra)
    assert (found.loss, found.gradient, found.weight) == (0.0, 0.0, 0.0)


def test_tied_pipeline_differs_in_the_tied_weight_alone() -> None:
    """Row E04."""
    reference = serial(*batches(1, 2), "--fp32")
    for trace in traces(1, 2, 1, *batches(1, 2), "--fp32"):
        assert trace.losses[0] == reference.losses[0]
        for name, (_, gradient) in trace.gradients.items():
            wanted = reference.gradients[name][1]
            if name == "embedding.word.weight":
                assert (gradient - wanted).norm() <= 3e-7 * wanted.norm()
            else:
                assert gradient.equal(wanted), name


def test_two_replicas_are_bitwise_the_sum_in_rank_order() -> None:
    """Row E05: one process that accumulates the two replicas' micro-batches in turn adds in the same order."""
    found = compare(serial(4, 2, "--fp32"), traces(1, 1, 2, 4, 1, "--fp32"))
    assert (found.loss, found.gradient) == (0.0, 0.0)


@pytest.mark.parametrize("mask", [pytest.param("", marks=pytest.mark.slow), "--eod-mask-loss --reset-attention-mask"])
def test_micro_batches_may_be_cut_otherwise(mask: str) -> None:
    """Row E11: a mean over tokens, also where micro-batches hold unequal numbers of them."""
    found = compare(serial(8, 1, f"--fp32 {mask}"), [serial(2, 4, f"--fp32 {mask}")])
    assert found.first_loss <= 1e-6
    assert found.gradient <= 1e-6
    exact = compare(serial(8, 1, f"--fp64 {mask}"), [serial(2, 4, f"--fp64 {mask}")])
    assert exact.loss <= 1e-12
    assert exact.gradient <= 1e-11


@pytest.mark.parametrize(
    ("tensor", "pipe", "dropout"),
    [
        pytest.param(1, 1, "", marks=pytest.mark.slow),
        pytest.param(2, 2, "", marks=pytest.mark.slow),
        pytest.param(1, 1, "--hidden-dropout 0.1 --attention-dropout 0.1", marks=pytest.mark.slow),
        (2, 2, "--hidden-dropout 0.1 --attention-dropout 0.1"),
    ],
)
def test_recompute_changes_no_bit(tensor: int, pipe: int, dropout: str) -> None:
    """Row E08, with the dropout masks drawn again in backward."""
    plain = traces(tensor, pipe, 1, 2, 2, f"--fp32 {dropout}")
    for how in ("--checkpoint-activations", "--recompute-granularity selective"):
        recomputed = traces(tensor, pipe, 1, 2, 2, f"--fp32 {dropout} {how}")
        assert [t.losses for t in plain] == [t.losses for t in recomputed]
        for one, other in zip(plain, recomputed, strict=True):
            assert_same_gradients(one, other)


def test_pipeline_draws_the_dropout_masks_of_one_process() -> None:
    """Masks are keyed by layer and micro-batch, so cutting by layers alone changes nothing."""
    extra = "--fp32 --hidden-dropout 0.1 --attention-dropout 0.1 --untie-embeddings-and-output-weights"
    found = compare(serial(2, 2, extra), traces(1, 2, 1, 2, 2, extra))
    assert (found.loss, found.gradient) == (0.0, 0.0)


@pytest.mark.parametrize(("tensor", "pipe"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 2)])
def test_evaluation_leaves_training_as_it_was(tensor: int, pipe: int) -> None:
    """Row E20, with dropout on: evaluation draws no mask and moves no state."""
    extra = "--fp32 --hidden-dropout 0.1 --attention-dropout 0.1"
    without = traces(tensor, pipe, 1, 2, 2, extra)
    evaluated = traces(tensor, pipe, 1, 2, 2, extra, eval_every=1)
    assert [t.losses for t in without] == [t.losses for t in evaluated]
    assert evaluated[0].eval_losses[0] != evaluated[0].eval_losses[-1]


def test_evaluation_is_the_same_in_a_pipeline() -> None:
    """Row E20: the loss that one process evaluates, bit for bit."""
    extra = "--fp32 --untie-embeddings-and-output-weights"
    one = serial(2, 2, extra, eval_every=1)
    for trace in traces(1, 2, 1, 2, 2, extra, eval_every=1):
        assert trace.eval_losses == one.eval_losses


def test_bf16_trains_close_to_fp32_and_equal_in_every_replica() -> None:
    wide, narrow = serial(4, 2, "--fp32"), traces(2, 2, 1, 4, 2, "--bf16")
    assert abs(narrow[0].losses[-1] - wide.losses[-1]) < 0.05
    assert len({tuple(t.losses) for t in narrow}) == 1


def assert_same_gradients(one: Trace, other: Trace) -> None:
    assert one.gradients.keys() == other.gradients.keys()
    for name, (_, gradient) in one.gradients.items():
        assert gradient.equal(other.gradients[name][1]), name

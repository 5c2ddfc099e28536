"""Every layout of 1, 2 and 4 ranks gives the loss, every gradient and the gradient norm of one process."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.training.parity import Difference, Trace, compare
from tests.helpers.layouts import (
    LAYOUTS,
    check_fp64,
    compare_layout,
    split_global_batch,
    trace_layout,
    trace_one_process,
)


def check_fp32(diff: Difference) -> None:
    """Row E02: the measured floors of fp32."""
    assert diff.first_loss <= 2e-6
    assert diff.loss <= 5e-5
    assert diff.gradient <= 3e-6, diff.worst_gradient
    assert diff.first_norm <= 1e-6


def slow_but(*quick: tuple[int, int, int]) -> list[Any]:
    """Return every layout; all but ``quick`` are slow."""
    return [pytest.param(*layout, marks=() if layout in quick else pytest.mark.slow) for layout in LAYOUTS]


@pytest.mark.parametrize(("tensor", "pipe", "data"), slow_but((2, 2, 1), (1, 2, 2)))
def test_fp64_equals_single_process(tensor: int, pipe: int, data: int, steps: int) -> None:
    check_fp64(compare_layout(tensor, pipe, data, 2, "--fp64 --clip-grad 0.5", steps=steps))


@pytest.mark.parametrize(("tensor", "pipe", "data"), [(4, 1, 1), (1, 4, 1), (1, 1, 4)])
def test_four_ranks_of_one_axis_equal_single_process(tensor: int, pipe: int, data: int) -> None:
    check_fp64(compare_layout(tensor, pipe, data, 2, "--fp64 --clip-grad 0.5"))


@pytest.mark.parametrize(("tensor", "pipe", "data"), slow_but((2, 2, 1)))
def test_fp32_stays_within_measured_floor(tensor: int, pipe: int, data: int) -> None:
    check_fp32(compare_layout(tensor, pipe, data, 2, "--fp32 --clip-grad 0.5"))


@pytest.mark.parametrize(
    ("layout", "gas"),
    [((1, 2, 2), 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in (((2, 2, 1), 4), ((2, 2, 1), 1)))],
)
def test_accumulation_of_1_and_4_equals_single_process(layout: tuple[int, int, int], gas: int) -> None:
    check_fp64(compare_layout(*layout, gas, "--fp64"))


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
def test_variants_equal_single_process(extra: str, layout: tuple[int, int, int]) -> None:
    check_fp64(compare_layout(*layout, 2, f"--fp64 {extra}"))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_fp32_stays_close_for_100_steps(tensor: int, pipe: int, data: int) -> None:
    check_fp32(compare_layout(tensor, pipe, data, 2, "--fp32 --clip-grad 1.0 --train-iters 100", steps=100))


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", "--untie-embeddings-and-output-weights", "--checkpoint-activations"])
@pytest.mark.parametrize("gas", [1, 2, 4])
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_every_layout_with_every_option_equals_single_process(
    tensor: int, pipe: int, data: int, gas: int, extra: str
) -> None:
    check_fp64(compare_layout(tensor, pipe, data, gas, f"--fp64 {extra}", steps=6))


@pytest.mark.parametrize("mask", [pytest.param("", marks=pytest.mark.slow), "--eod-mask-loss"], ids=["", "masked"])
@pytest.mark.parametrize("pipe", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_untied_pipeline_is_bitwise_equal_in_fp32(pipe: int, mask: str) -> None:
    """Row E03: clipping off, the same micro-batches."""
    extra = f"--fp32 --untie-embeddings-and-output-weights {mask}"
    diff = compare_layout(1, pipe, 1, 2, extra)
    assert (diff.loss, diff.gradient, diff.weight) == (0.0, 0.0, 0.0)


def test_tied_pipeline_differs_only_in_tied_weight() -> None:
    """Row E04."""
    reference = trace_one_process(*split_global_batch(1, 2), "--fp32")
    for trace in trace_layout(1, 2, 1, *split_global_batch(1, 2), "--fp32"):
        assert trace.losses[0] == reference.losses[0]
        for name, (_, gradient) in trace.gradients.items():
            expected = reference.gradients[name][1]
            if name == "embedding.word.weight":
                assert (gradient - expected).norm() <= 3e-7 * expected.norm()
            else:
                assert gradient.equal(expected), name


def test_two_replicas_are_bitwise_sum_in_rank_order() -> None:
    """Row E05: one process that accumulates the two replicas' micro-batches in turn adds in the same order."""
    diff = compare(trace_one_process(4, 2, "--fp32"), trace_layout(1, 1, 2, 4, 1, "--fp32"))
    assert (diff.loss, diff.gradient) == (0.0, 0.0)


@pytest.mark.parametrize("mask", [pytest.param("", marks=pytest.mark.slow), "--eod-mask-loss --reset-attention-mask"])
def test_micro_batch_size_does_not_change_gradients(mask: str) -> None:
    """Row E11: a mean over tokens, also where micro-batches hold unequal numbers of them."""
    fp32_diff = compare(trace_one_process(8, 1, f"--fp32 {mask}"), [trace_one_process(2, 4, f"--fp32 {mask}")])
    assert fp32_diff.first_loss <= 1e-6
    assert fp32_diff.gradient <= 1e-6
    fp64_diff = compare(trace_one_process(8, 1, f"--fp64 {mask}"), [trace_one_process(2, 4, f"--fp64 {mask}")])
    assert fp64_diff.loss <= 1e-12
    assert fp64_diff.gradient <= 1e-11


@pytest.mark.parametrize(
    ("tensor", "pipe", "dropout"),
    [
        pytest.param(1, 1, "", marks=pytest.mark.slow),
        pytest.param(2, 2, "", marks=pytest.mark.slow),
        pytest.param(1, 1, "--hidden-dropout 0.1 --attention-dropout 0.1", marks=pytest.mark.slow),
        (2, 2, "--hidden-dropout 0.1 --attention-dropout 0.1"),
    ],
)
def test_recompute_is_bitwise_equal(tensor: int, pipe: int, dropout: str) -> None:
    """Row E08, with the dropout masks drawn again in backward."""
    plain = trace_layout(tensor, pipe, 1, 2, 2, f"--fp32 {dropout}")
    for recompute_flag in ("--checkpoint-activations", "--recompute-granularity selective"):
        recomputed = trace_layout(tensor, pipe, 1, 2, 2, f"--fp32 {dropout} {recompute_flag}")
        assert [t.losses for t in plain] == [t.losses for t in recomputed]
        for plain_trace, recomputed_trace in zip(plain, recomputed, strict=True):
            assert_same_gradients(plain_trace, recomputed_trace)


def test_pipeline_dropout_masks_equal_single_process() -> None:
    """Masks are keyed by layer and micro-batch, so cutting by layers alone changes nothing."""
    extra = "--fp32 --hidden-dropout 0.1 --attention-dropout 0.1 --untie-embeddings-and-output-weights"
    diff = compare(trace_one_process(2, 2, extra), trace_layout(1, 2, 1, 2, 2, extra))
    assert (diff.loss, diff.gradient) == (0.0, 0.0)


@pytest.mark.parametrize(("tensor", "pipe"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 2)])
def test_evaluation_does_not_change_training(tensor: int, pipe: int) -> None:
    """Row E20, with dropout on: evaluation draws no mask and moves no state."""
    extra = "--fp32 --hidden-dropout 0.1 --attention-dropout 0.1"
    plain = trace_layout(tensor, pipe, 1, 2, 2, extra)
    evaluated = trace_layout(tensor, pipe, 1, 2, 2, extra, eval_every=1)
    assert [t.losses for t in plain] == [t.losses for t in evaluated]
    assert evaluated[0].eval_losses[0] != evaluated[0].eval_losses[-1]


def test_pipeline_evaluation_equals_single_process() -> None:
    """Row E20: the loss that one process evaluates, bit for bit."""
    extra = "--fp32 --untie-embeddings-and-output-weights"
    reference = trace_one_process(2, 2, extra, eval_every=1)
    for trace in trace_layout(1, 2, 1, 2, 2, extra, eval_every=1):
        assert trace.eval_losses == reference.eval_losses


def test_bf16_stays_close_to_fp32_and_equal_across_replicas() -> None:
    fp32_trace, bf16_traces = trace_one_process(4, 2, "--fp32"), trace_layout(2, 2, 1, 4, 2, "--bf16")
    assert abs(bf16_traces[0].losses[-1] - fp32_trace.losses[-1]) < 0.05
    assert len({tuple(t.losses) for t in bf16_traces}) == 1


def assert_same_gradients(first: Trace, second: Trace) -> None:
    assert first.gradients.keys() == second.gradients.keys()
    for name, (_, gradient) in first.gradients.items():
        assert gradient.equal(second.gradients[name][1]), name

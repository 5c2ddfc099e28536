"""A sequence length that grows: the numbers of one process in every layout, and of samples that are the slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pretrain_gpt2
from megatron.config import parse
from megatron.data.mock_dataset import MockTokens
from megatron.training import initialize
from megatron.training.parity import Trace, compare, trace_steps
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import (
    SEQ,
    VOCAB,
    check_fp64,
    compare_layout,
    make_flags,
    split_global_batch,
    trace_layout,
    trace_one_process,
)

LENGTH_SCHEDULE = "--seq-length-schedule 0:4;300:8;600:16"  # a step is 256 tokens: lengths of 4, 4, 8, 16
DOCUMENT_FLAGS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
DROPOUT_FLAGS = "--attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
RUN_LENGTH = {"steps": 4, "eval_every": 1}
ALL_FLAGS = f"--fp64 --clip-grad 0.5 {LENGTH_SCHEDULE} {DOCUMENT_FLAGS} {DROPOUT_FLAGS}"


@pytest.mark.parametrize(
    ("tensor", "pipe", "data", "schedule"),
    [
        pytest.param(1, 2, 1, "--pipeline-chunks 2", marks=pytest.mark.slow),
        (1, 1, 2, ""),
        pytest.param(1, 2, 2, "", marks=pytest.mark.slow),
        pytest.param(1, 2, 1, "--pipeline-schedule zb-h1 --checkpoint-activations", marks=pytest.mark.slow),
        pytest.param(2, 1, 2, "--sequence-parallel", marks=pytest.mark.slow),
    ],
)
def test_run_across_length_changes_equals_single_process(tensor: int, pipe: int, data: int, schedule: str) -> None:
    """With documents apart and masks that know the sample; the losses of evaluations are at the length to come."""
    check_fp64(compare_layout(tensor, pipe, data, 2, ALL_FLAGS, schedule, **RUN_LENGTH))
    reference = trace_one_process(*split_global_batch(1, 2), ALL_FLAGS, **RUN_LENGTH)
    for trace in trace_layout(
        tensor, pipe, data, *split_global_batch(data, 2), f"{ALL_FLAGS} {schedule}", **RUN_LENGTH
    ):
        assert trace.eval_losses == pytest.approx(reference.eval_losses, abs=1e-12, rel=0)


@pytest.mark.slow
@pytest.mark.parametrize("comm", ["all_gather", "a2a"])
def test_context_parallel_sequences_grow(comm: str) -> None:
    check_fp64(compare_layout(1, 1, 1, 2, ALL_FLAGS, f"--cp-comm-type {comm}", context=2, **RUN_LENGTH))


@pytest.mark.slow
def test_micro_batch_size_does_not_change_training() -> None:
    check_fp64(
        compare(trace_one_process(8, 2, ALL_FLAGS, **RUN_LENGTH), [trace_one_process(4, 4, ALL_FLAGS, **RUN_LENGTH)])
    )


@pytest.mark.slow  # a length equals samples of that length, below
def test_model_sees_scheduled_length() -> None:
    """The first steps are those of short slices, and other ones than of whole samples."""
    scheduled, full_length = (
        trace_one_process(*split_global_batch(1, 2), f"--fp64 {extra}", steps=4) for extra in (LENGTH_SCHEDULE, "")
    )
    assert abs(scheduled.losses[0] - full_length.losses[0]) > 1e-6
    constant = trace_one_process(*split_global_batch(1, 2), f"--fp64 --seq-length-schedule 0:{SEQ}", steps=4)
    assert constant.losses == full_length.losses and constant.grad_norms == full_length.grad_norms


class SampleChunks:
    """The slices of ``length`` tokens of the samples that the other runs read, as samples of their own."""

    def __init__(self, length: int) -> None:
        self.samples, self.length = MockTokens(VOCAB, SEQ, seed=7), length

    def __getitem__(self, index: int) -> np.ndarray:
        sample_idx, chunk_idx = divmod(index, SEQ // self.length)
        return self.samples[sample_idx][chunk_idx * self.length :][: self.length + 1]


def train_on_chunks(rank: int, argv: list[str], length: int) -> Trace:
    config = parse(argv, world_size=1).with_vocab(VOCAB)
    world: Any = initialize.start(config)
    providers = (pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
    return trace_steps(
        config,
        world,
        SampleChunks(length),
        *providers,
        num_steps=RUN_LENGTH["steps"],
        eval_every=RUN_LENGTH["eval_every"],
    )


@pytest.mark.parametrize("length", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_scheduled_length_equals_samples_of_that_length(length: int) -> None:
    """Four steps at one length, with documents apart and dropout, against --seq-length of it."""
    extra = f"--fp64 --clip-grad 0.5 {DOCUMENT_FLAGS} {DROPOUT_FLAGS}"
    scheduled = trace_one_process(
        *split_global_batch(1, 2), f"{extra} --seq-length-schedule 0:{length};9999:{SEQ}", **RUN_LENGTH
    )
    micro = split_global_batch(1, 2)[0] * SEQ // length
    argv = make_flags(1, 1, micro_batch_size=micro, gas=2, extra=f"{extra} --seq-length {length}")
    (chunked,) = run_ranks(1, train_on_chunks, argv, length, deadline_s=100.0)
    check_fp64(compare(chunked, [scheduled]))
    assert scheduled.eval_losses == pytest.approx(chunked.eval_losses, abs=1e-12, rel=0)

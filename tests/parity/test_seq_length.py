"""A sequence length that grows: the numbers of one process in every layout, and of samples that are the pieces."""

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
from tests.helpers.layouts import SEQ, VOCAB, batches, check_fp64, difference, flags, serial, traces

GROWS = "--seq-length-schedule 0:4;300:8;600:16"  # a step is 256 tokens: lengths of 4, 4, 8, 16
APART = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
DROPPED = "--attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
STEPS = {"steps": 4, "eval_every": 1}
ALL = f"--fp64 --clip-grad 0.5 {GROWS} {APART} {DROPPED}"


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
def test_a_run_through_its_switches_equals_one_process(tensor: int, pipe: int, data: int, schedule: str) -> None:
    """With documents apart and masks that know the sample; the losses of evaluations are at the length to come."""
    check_fp64(difference(tensor, pipe, data, 2, ALL, schedule, **STEPS))
    alone = serial(*batches(1, 2), ALL, **STEPS)
    for trace in traces(tensor, pipe, data, *batches(data, 2), f"{ALL} {schedule}", **STEPS):
        assert trace.eval_losses == pytest.approx(alone.eval_losses, abs=1e-12, rel=0)


@pytest.mark.slow
@pytest.mark.parametrize("comm", ["all_gather", "a2a"])
def test_sequences_that_are_cut_over_ranks_grow_too(comm: str) -> None:
    check_fp64(difference(1, 1, 1, 2, ALL, f"--cp-comm-type {comm}", context=2, **STEPS))


@pytest.mark.slow
def test_micro_batches_may_be_cut_otherwise() -> None:
    check_fp64(compare(serial(8, 2, ALL, **STEPS), [serial(4, 4, ALL, **STEPS)]))


@pytest.mark.slow  # a length equals samples of that length, below
def test_the_length_is_seen_by_the_model() -> None:
    """The first steps are those of short pieces, and other ones than of whole samples."""
    grows, whole = (serial(*batches(1, 2), f"--fp64 {extra}", steps=4) for extra in (GROWS, ""))
    assert abs(grows.losses[0] - whole.losses[0]) > 1e-6
    neutral = serial(*batches(1, 2), f"--fp64 --seq-length-schedule 0:{SEQ}", steps=4)
    assert neutral.losses == whole.losses and neutral.grad_norms == whole.grad_norms


class Pieces:
    """The pieces of ``length`` tokens of the samples that the other runs read, as samples of their own."""

    def __init__(self, length: int) -> None:
        self.whole, self.length = MockTokens(VOCAB, SEQ, seed=7), length

    def __getitem__(self, index: int) -> np.ndarray:
        sample, piece = divmod(index, SEQ // self.length)
        return self.whole[sample][piece * self.length :][: self.length + 1]


def of_pieces(rank: int, argv: list[str], length: int) -> Trace:
    config = parse(argv, world_size=1).with_vocab(VOCAB)
    here: Any = initialize.start(config)
    parts = (pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
    return trace_steps(config, here, Pieces(length), *parts, **STEPS)


@pytest.mark.parametrize("length", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_length_equals_samples_of_that_length_that_are_the_pieces(length: int) -> None:
    """Four steps at one length, with documents apart and dropout, against --seq-length of it."""
    extra = f"--fp64 --clip-grad 0.5 {APART} {DROPPED}"
    cut = serial(*batches(1, 2), f"{extra} --seq-length-schedule 0:{length};9999:{SEQ}", **STEPS)
    micro = batches(1, 2)[0] * SEQ // length
    argv = flags(1, 1, micro=micro, gas=2, extra=f"{extra} --seq-length {length}")
    (pieces,) = run_ranks(1, of_pieces, argv, length, deadline_s=100.0)
    check_fp64(compare(pieces, [cut]))
    assert cut.eval_losses == pytest.approx(pieces.eval_losses, abs=1e-12, rel=0)

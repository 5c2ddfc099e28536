"""A curriculum that truncates samples: the values of one process in every layout, and of samples truncated by hand."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

import pretrain_gpt2
from megatron.config import parse
from megatron.config.seq_length import SeqLengths
from megatron.data import collate
from megatron.data.mock_dataset import MockTokens
from megatron.training import initialize
from megatron.training.data import RunData
from megatron.training.parity import Difference, Trace, compare, trace_steps
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import (
    GLOBAL_BATCH,
    SEQ,
    VOCAB,
    check_fp64,
    compare_layout,
    make_flags,
    split_global_batch,
    trace_layout,
    trace_one_process,
)

CURRICULUM = "fixed_linear min_difficulty=4 max_difficulty=16 total_curriculum_step=4 difficulty_step=4"
LENGTHS = (4, 8, 12, 16)  # 12 does not divide the 16 tokens of a sample
RUN_LENGTH = {"steps": 4, "eval_every": 1}
DOCUMENT_FLAGS = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
DROPOUT_FLAGS = "--attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
TOKEN_FLAGS = "--train-tokens 9000 --lr-decay-tokens 2000 --lr-warmup-tokens 300 --lr-decay-style cosine"
BASE_FLAGS = f"--fp64 --clip-grad 0.5 {DOCUMENT_FLAGS}"
ALL_FLAGS = f"{BASE_FLAGS} {DROPOUT_FLAGS} {TOKEN_FLAGS} --seq-length-curriculum {CURRICULUM}"


@pytest.mark.parametrize(
    ("tensor", "pipe", "data", "layout_flags"),
    [
        (1, 1, 2, ""),
        pytest.param(2, 1, 1, "--sequence-parallel", marks=pytest.mark.slow),
        pytest.param(1, 2, 1, "", marks=pytest.mark.slow),
        pytest.param(1, 2, 1, "--pipeline-chunks 2", marks=pytest.mark.slow),
        pytest.param(1, 2, 1, "--pipeline-schedule zb-h1 --checkpoint-activations", marks=pytest.mark.slow),
        pytest.param(1, 1, 2, "--zero-stage 1", marks=pytest.mark.slow),
        pytest.param(1, 1, 2, "--zero-stage 3", marks=pytest.mark.slow),
        pytest.param(2, 1, 2, "--sequence-parallel --zero-stage 2", marks=pytest.mark.slow),
    ],
)
def test_curriculum_equals_single_process(tensor: int, pipe: int, data: int, layout_flags: str) -> None:
    """Evaluations read full samples between the steps."""
    check_fp64(compare_layout(tensor, pipe, data, 2, ALL_FLAGS, layout_flags, **RUN_LENGTH))
    reference = trace_one_process(*split_global_batch(1, 2), ALL_FLAGS, **RUN_LENGTH)
    for trace in trace_layout(
        tensor, pipe, data, *split_global_batch(data, 2), f"{ALL_FLAGS} {layout_flags}", **RUN_LENGTH
    ):
        assert trace.eval_losses == pytest.approx(reference.eval_losses, abs=1e-12, rel=0)


@pytest.mark.slow
@pytest.mark.parametrize("comm", ["all_gather", "a2a"])
def test_context_parallel_curriculum_equals_single_process(comm: str) -> None:
    check_fp64(compare_layout(1, 1, 1, 2, ALL_FLAGS, f"--cp-comm-type {comm}", context=2, **RUN_LENGTH))


class TruncatedByHand:
    """The samples of the other runs, each with the length of the step that reads it."""

    def __init__(self) -> None:
        self.samples = MockTokens(VOCAB, SEQ, seed=7)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.samples[index][: LENGTHS[index // GLOBAL_BATCH] + 1]


def train_by_hand(rank: int, argv: list[str]) -> Trace:
    """Train on truncated samples without a curriculum; evaluations read full samples."""
    config = parse(argv, world_size=1).with_vocab(VOCAB)
    world: Any = initialize.start(config)
    batches = RunData.batches

    def batches_of_split(data: RunData, split: str, *args: Any, **kwargs: Any) -> Any:
        if split == "valid":
            data = RunData({"valid": MockTokens(VOCAB, SEQ, seed=7)}, None)
        return batches(data, split, *args, **kwargs)

    providers = (pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
    with mock.patch.object(RunData, "batches", batches_of_split):
        return trace_steps(
            config, world, TruncatedByHand(), *providers, num_steps=RUN_LENGTH["steps"], eval_every=1
        )  # fmt: skip


def train_mutant(rank: int, argv: list[str], mutant: str) -> Trace:
    config = parse(argv, world_size=1).with_vocab(VOCAB)
    world: Any = initialize.start(config)
    length_of_step, truncate = SeqLengths.length_of_step, collate.truncate_windows
    mutants = {
        "previous length": mock.patch.object(
            SeqLengths, "length_of_step", lambda lengths, consumed, step: length_of_step(lengths, consumed, step - 1)
        ),
        "longer labels": mock.patch.object(
            collate, "truncate_windows", lambda key, values, length: truncate(key, values, min(length + 4, SEQ))
        ),
    }
    providers = (pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
    with mutants[mutant]:
        data = MockTokens(VOCAB, SEQ, seed=7)
        return trace_steps(config, world, data, *providers, num_steps=RUN_LENGTH["steps"], eval_every=1)


def by_hand(function: Any, extra: str, *args: Any) -> Trace:
    micro, gas = split_global_batch(1, 2)
    argv = make_flags(1, 1, micro_batch_size=micro, gas=gas, extra=extra)
    (trace,) = run_ranks(1, function, argv, *args, deadline_s=100.0)
    return trace


STEP_FLAGS = f"{BASE_FLAGS} {DROPOUT_FLAGS}"


def compare_with_hand(trace: Trace) -> Difference:
    truncated = by_hand(train_by_hand, STEP_FLAGS)
    assert trace.eval_losses == pytest.approx(truncated.eval_losses, abs=1e-12, rel=0)
    return compare(truncated, [trace])


def test_curriculum_equals_samples_truncated_by_hand() -> None:
    """Four steps of four lengths, with separate documents and dropout, and evaluations at full length."""
    trace = trace_one_process(
        *split_global_batch(1, 2), f"{STEP_FLAGS} --seq-length-curriculum {CURRICULUM}", **RUN_LENGTH
    )
    check_fp64(compare_with_hand(trace))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["previous length", "longer labels"])
def test_mutants_differ_from_samples_truncated_by_hand(mutant: str) -> None:
    trace = by_hand(train_mutant, f"{STEP_FLAGS} --seq-length-curriculum {CURRICULUM}", mutant)
    with pytest.raises(AssertionError):
        check_fp64(compare_with_hand(trace))

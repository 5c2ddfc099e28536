"""Embedding and cross-entropy of a vocabulary cut over ranks, for sizes that do not divide, against torch."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.groups import Group
from megatron.mpu.layers import VocabParallelEmbedding, vocab_range
from megatron.mpu.shard import shard_of
from tests.helpers.harness import run_ranks
from tests.helpers.whole import fill_shard, group_of_all_ranks, random_tensor

H, SHAPE = 4, (2, 7)
CASES = [(101, 1), (101, 8), (5, 1), (3, 1), (64, 1)]  # (vocabulary, divisible by); of 5 and 3, rank 3 of 4 holds none
PADDING = 50.0  # in padded rows: were they in the softmax, they would take all probability


def random_tokens(vocab, seed):
    return torch.randint(0, vocab, SHAPE, generator=torch.Generator().manual_seed(seed))


def run_rank(rank, size):
    group = group_of_all_ranks(rank, size)
    return {case: (*run_embedding(group, *case), *run_cross_entropy(group, *case)) for case in CASES}


def run_embedding(group, vocab, divisible_by):
    layer = VocabParallelEmbedding(vocab, H, divisible_by=divisible_by, group=group).double()
    fill_shard(layer.weight, random_tensor(1, vocab, H))
    y = layer(random_tokens(vocab, 2))
    y.backward(random_tensor(3, *SHAPE, H))
    return shard_of(layer.weight), y.detach(), layer.weight.grad


def run_cross_entropy(group, vocab, divisible_by):
    rows, start, num_real = vocab_range(vocab, group, divisible_by)
    local_logits = torch.full((*SHAPE, rows), PADDING, dtype=torch.float64)
    local_logits[..., :num_real] = make_logits(vocab)[..., start : start + num_real]
    local_logits.requires_grad_()
    losses = vocab_parallel_cross_entropy(
        local_logits, random_tokens(vocab, 5), vocab_size=vocab, divisible_by=divisible_by, group=group
    )
    losses.backward(random_tensor(6, *SHAPE))
    return losses.detach(), local_logits.grad


def make_logits(vocab):
    return random_tensor(4, *SHAPE, vocab) * 20.0  # far apart, so that a missing subtraction of the largest shows


@functools.cache
def rank_results(size):
    return run_ranks(size, run_rank, size) if size > 1 else [run_rank(0, 1)]


all_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: f"vocabulary {case[0]} by {case[1]}")
WORLD_SIZES = pytest.mark.parametrize("size", [1, 2, 4])


@WORLD_SIZES
@all_cases
def test_embedding_matches_torch_and_padded_rows_get_no_gradient(case, size):
    vocab, _ = case
    table = random_tensor(1, vocab, H).requires_grad_()
    expected = F.embedding(random_tokens(vocab, 2), table)
    expected.backward(random_tensor(3, *SHAPE, H))
    for results in rank_results(size):
        shard, y, gradient, *_ = results[case]
        assert torch.equal(y, expected)
        assert torch.equal(gradient[: shard.length], shard.narrow(table.grad))
        assert gradient[shard.length :].count_nonzero() == 0


@WORLD_SIZES
@all_cases
def test_cross_entropy_matches_torch_and_ignores_padded_columns(case, size):
    vocab, _ = case
    logits = make_logits(vocab).requires_grad_()
    expected = F.cross_entropy(logits.flatten(0, 1), random_tokens(vocab, 5).flatten(), reduction="none").view(SHAPE)
    expected.backward(random_tensor(6, *SHAPE))
    for results in rank_results(size):
        shard, _, _, losses, gradient = results[case]
        local_grad = logits.grad[..., shard.start : shard.start + shard.length]
        assert (losses - expected).abs().max() <= 1e-13 * expected.abs().max()
        assert (gradient[..., : shard.length] - local_grad).abs().sum() <= 1e-13 * logits.grad.abs().max()
        assert gradient[..., shard.length :].count_nonzero() == 0


def run_low_precision(rank, size):
    group = group_of_all_ranks(rank, size)
    _, start, num_real = vocab_range(64, group)
    logits = make_logits(64)[..., start : start + num_real].bfloat16()
    return vocab_parallel_cross_entropy(logits, random_tokens(64, 5), vocab_size=64, group=group)


def test_16_bit_logits_give_fp32_losses():
    logits = make_logits(64).bfloat16().float()
    expected = F.cross_entropy(logits.flatten(0, 1), random_tokens(64, 5).flatten(), reduction="none").view(SHAPE)
    for losses in [run_low_precision(0, 1), *run_ranks(2, run_low_precision, 2)]:
        assert losses.dtype == torch.float32
        assert (losses - expected).abs().max() <= 1e-5


def find_rejected_widths(rank, size):
    """Return the widths of logits for a vocabulary of 101 in rows of 8 that this rank rejects."""
    group = group_of_all_ranks(rank, size)
    rejected = []
    for width in (52, 56, 101, 104, 112):
        try:
            vocab_parallel_cross_entropy(
                torch.zeros(*SHAPE, width), random_tokens(45, 5), vocab_size=101, divisible_by=8, group=group
            )
        except ValueError as error:
            assert f"got {width}. Pass logits [..., v/t] that are not gathered" in str(error)
            rejected.append(width)
    return rejected


def test_logits_that_are_not_own_shard_are_rejected():
    """Gathered logits would give the loss of another vocabulary (Megatron-LM #7452, finding 2).

    Each of two ranks has 56 rows. A table of other rows has another ``divisible_by``.
    """
    assert find_rejected_widths(0, 1) == [52, 56]
    assert run_ranks(2, find_rejected_widths, 2) == [[52, 101, 104, 112]] * 2


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(1, 8), st.integers(1, 16))
def test_vocab_ranges_cover_each_token_once_with_equal_size(vocab, size, divisible_by):
    ranges = [vocab_range(vocab, Group(tuple(range(size)), rank), divisible_by) for rank in range(size)]
    covered = [token for _, start, count in ranges for token in range(start, start + count)]
    assert covered == list(range(vocab))
    rows = {rows for rows, _, _ in ranges}
    assert len(rows) == 1 and rows.pop() % divisible_by == 0
    assert 0 <= ranges[0][0] * size - vocab < divisible_by * size


def test_second_backward_raises():
    """On one rank backward reuses the memory of forward."""
    logits = make_logits(64).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, random_tokens(64, 5), vocab_size=64).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

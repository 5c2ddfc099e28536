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
from tests.helpers.whole import fill, random, whole_world

H, SHAPE = 4, (2, 7)
CASES = [(101, 1), (101, 8), (5, 1), (3, 1), (64, 1)]  # (vocabulary, divisible by); of 5 and 3, rank 3 of 4 holds none
PADDING = 50.0  # in padded rows: were they in the softmax, they would take all probability


def tokens_of(vocab, seed):
    return torch.randint(0, vocab, SHAPE, generator=torch.Generator().manual_seed(seed))


def of_rank(rank, size):
    group = whole_world(rank, size)
    return {case: (*embed(group, *case), *entropy(group, *case)) for case in CASES}


def embed(group, vocab, divisible_by):
    layer = VocabParallelEmbedding(vocab, H, divisible_by=divisible_by, group=group).double()
    fill(layer.weight, random(1, vocab, H))
    y = layer(tokens_of(vocab, 2))
    y.backward(random(3, *SHAPE, H))
    return shard_of(layer.weight), y.detach(), layer.weight.grad


def entropy(group, vocab, divisible_by):
    rows, start, num_real = vocab_range(vocab, group, divisible_by)
    local = torch.full((*SHAPE, rows), PADDING, dtype=torch.float64)
    local[..., :num_real] = logits_of(vocab)[..., start : start + num_real]
    local.requires_grad_()
    losses = vocab_parallel_cross_entropy(
        local, tokens_of(vocab, 5), vocab_size=vocab, divisible_by=divisible_by, group=group
    )
    losses.backward(random(6, *SHAPE))
    return losses.detach(), local.grad


def logits_of(vocab):
    return random(4, *SHAPE, vocab) * 20.0  # far apart, so that a missing subtraction of the largest shows


@functools.cache
def seen(size):
    return run_ranks(size, of_rank, size) if size > 1 else [of_rank(0, 1)]


every = pytest.mark.parametrize("case", CASES, ids=lambda case: f"vocabulary {case[0]} by {case[1]}")
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


@SIZES
@every
def test_embedding_equals_torch_and_padded_rows_get_no_gradient(case, size):
    vocab, _ = case
    table = random(1, vocab, H).requires_grad_()
    expected = F.embedding(tokens_of(vocab, 2), table)
    expected.backward(random(3, *SHAPE, H))
    for results in seen(size):
        shard, y, gradient, *_ = results[case]
        assert torch.equal(y, expected)
        assert torch.equal(gradient[: shard.length], shard.cut(table.grad))
        assert gradient[shard.length :].count_nonzero() == 0


@SIZES
@every
def test_cross_entropy_equals_torch_and_padded_columns_get_no_probability(case, size):
    vocab, _ = case
    logits = logits_of(vocab).requires_grad_()
    expected = F.cross_entropy(logits.flatten(0, 1), tokens_of(vocab, 5).flatten(), reduction="none").view(SHAPE)
    expected.backward(random(6, *SHAPE))
    for results in seen(size):
        shard, _, _, losses, gradient = results[case]
        own = logits.grad[..., shard.start : shard.start + shard.length]
        assert (losses - expected).abs().max() <= 1e-13 * expected.abs().max()
        assert (gradient[..., : shard.length] - own).abs().sum() <= 1e-13 * logits.grad.abs().max()
        assert gradient[..., shard.length :].count_nonzero() == 0


def low_precision(rank, size):
    group = whole_world(rank, size)
    _, start, num_real = vocab_range(64, group)
    logits = logits_of(64)[..., start : start + num_real].bfloat16()
    return vocab_parallel_cross_entropy(logits, tokens_of(64, 5), vocab_size=64, group=group)


def test_losses_of_16_bit_logits_are_taken_in_fp32():
    logits = logits_of(64).bfloat16().float()
    expected = F.cross_entropy(logits.flatten(0, 1), tokens_of(64, 5).flatten(), reduction="none").view(SHAPE)
    for losses in [low_precision(0, 1), *run_ranks(2, low_precision, 2)]:
        assert losses.dtype == torch.float32
        assert (losses - expected).abs().max() <= 1e-5


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(1, 8), st.integers(1, 16))
def test_ranges_cover_each_token_once_and_tables_are_of_one_size(vocab, size, divisible_by):
    ranges = [vocab_range(vocab, Group(tuple(range(size)), rank), divisible_by) for rank in range(size)]
    covered = [token for _, start, count in ranges for token in range(start, start + count)]
    assert covered == list(range(vocab))
    rows = {rows for rows, _, _ in ranges}
    assert len(rows) == 1 and rows.pop() % divisible_by == 0
    assert 0 <= ranges[0][0] * size - vocab < divisible_by * size


def test_a_second_backward_raises_rather_than_giving_other_gradients():
    """On one rank backward reuses the memory of forward."""
    logits = logits_of(64).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, tokens_of(64, 5), vocab_size=64).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

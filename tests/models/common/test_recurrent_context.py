"""Exchange of states and tokens between the chunks of a sequence, against all chunks in one process."""

from __future__ import annotations

import pytest
import torch

from megatron.models.common.recurrent_context import (
    chunk_starts,
    join_chunks,
    left_tokens,
    prefix_states,
    split_chunks,
)
from megatron.mpu.context_parallel import split_along_context
from megatron.mpu.groups import Group
from megatron.mpu.topology import chunk_indices
from tests.helpers.count_bytes import count_sent_bytes
from tests.helpers.harness import run_ranks
from tests.helpers.recurrent_samples import make_starts
from tests.helpers.whole import group_of_all_ranks, random_tensor

BATCH, NUM_HEADS, KEY_SIZE, VALUE_SIZE, CHANNELS = 2, 3, 4, 5, 3
TOLERANCE = 1e-12
Tensors = list[torch.Tensor]


def local_chunks(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return the rank's two chunks of ``x`` [2c, b, ...] as a batch [2b, ...]."""
    return x[list(chunk_indices(rank, size))].flatten(0, 1)


def prefix_in_one_process(transitions: torch.Tensor, finals: torch.Tensor) -> torch.Tensor:
    """Return the initial states of all chunks [2c, b, a, d_k, d_v]."""
    states = [torch.zeros_like(finals[0])]
    for transition, final in zip(transitions[:-1], finals[:-1], strict=True):
        is_number = transition.shape[-1] != KEY_SIZE
        states.append((transition * states[-1] if is_number else transition @ states[-1]) + final)
    return torch.stack(states)


def run_prefix(rank: int, size: int, columns: int) -> tuple[Tensors, Tensors, float]:
    """Return (initial states, gradients) of this rank's chunks, the expected ones, and the bytes that were sent."""
    group = group_of_all_ranks(rank, size)
    transitions = random_tensor(0, 2 * size, BATCH, NUM_HEADS, columns, columns).requires_grad_()
    finals = random_tensor(1, 2 * size, BATCH, NUM_HEADS, KEY_SIZE, VALUE_SIZE).requires_grad_()
    weights = random_tensor(2, *finals.shape)
    full = prefix_in_one_process(transitions, finals)
    full_grads = torch.autograd.grad((full * weights).sum(), (transitions, finals))
    leaves = [local_chunks(x.detach(), rank, size).requires_grad_() for x in (transitions, finals)]
    with count_sent_bytes(size) as sent:
        initial = prefix_states(*leaves, group)
    grads = torch.autograd.grad((initial * local_chunks(weights, rank, size)).sum(), leaves)
    expected = [local_chunks(x.detach(), rank, size) for x in (full, *full_grads)]
    return [initial.detach(), *grads], expected, sum(sent)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("columns", [1, KEY_SIZE])
def test_initial_states_and_gradients_match_one_process(size: int, columns: int) -> None:
    """A transition is a number per head, or a matrix."""
    for actual, expected, sent in run_ranks(size, run_prefix, size, columns):
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=TOLERANCE)
        elements = BATCH * NUM_HEADS * (columns * columns + KEY_SIZE * VALUE_SIZE)
        assert sent == 2 * (size - 1) * elements * 8


def run_left_tokens(rank: int, size: int, length: int, num_tokens: int) -> tuple[Tensors, Tensors]:
    group = group_of_all_ranks(rank, size)
    full = random_tensor(0, length * 2 * size, BATCH, CHANNELS).requires_grad_()
    padded = torch.nn.functional.pad(full, (0, 0, 0, 0, num_tokens, 0))
    weights = random_tensor(1, 2 * size, num_tokens, BATCH, CHANNELS)
    windows = torch.stack([padded[idx * length : idx * length + num_tokens] for idx in range(2 * size)])
    (full_grad,) = torch.autograd.grad((windows * weights).sum(), full)
    x = split_along_context(full.detach(), group, dim=0).requires_grad_()
    left = left_tokens(split_chunks(x, group), num_tokens, group)
    assert left is not None
    (grad,) = torch.autograd.grad((left * local_chunks(weights.transpose(1, 2), rank, size)).sum(), x)
    expected = local_chunks(windows.detach().transpose(1, 2), rank, size)
    return [left.detach(), grad], [expected, split_along_context(full_grad, group, dim=0)]


@pytest.mark.parametrize(("size", "length", "num_tokens"), [(2, 4, 3), (4, 1, 3), (2, 2, 5)])
def test_left_tokens_match_one_process(size: int, length: int, num_tokens: int) -> None:
    """Also with chunks that are shorter than the convolution, and with fewer tokens before a chunk than it reads."""
    for actual, expected in run_ranks(size, run_left_tokens, size, length, num_tokens):
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 1)])
def test_chunks_are_samples_of_a_batch(size: int, rank: int) -> None:
    group = Group(tuple(range(size)), rank)
    starts = make_starts(8, [[0, 3, 5], [0, 7]])
    positions = torch.arange(8).expand(BATCH, -1)
    tokens = split_along_context(positions.t(), group, dim=0)  # [s/c, b]
    chunks = split_chunks(tokens, group)
    assert join_chunks(chunks, group).equal(tokens)
    local_starts = chunk_starts(starts, len(tokens), group)
    assert local_starts is not None
    full_starts = split_chunks(split_along_context(starts.t(), group, dim=0), group)
    assert (local_starts + chunks[:, :1]).equal(full_starts)
    assert chunk_starts(None, len(tokens), group) is None

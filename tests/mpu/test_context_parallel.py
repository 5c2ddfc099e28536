"""Which tokens a rank of the context group has, and that exchanges are each other's transposes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.mpu import context_parallel
from megatron.mpu.groups import SINGLE, Group
from tests.helpers.harness import run_ranks
from tests.helpers.whole import group_of_all_ranks, random_tensor


def make_group(rank: int, size: int) -> Group:
    """Return a group without a handle, for what sends nothing."""
    return Group(tuple(range(size)), rank)


@given(size=st.integers(2, 8), n=st.integers(1, 5))
def test_tokens_are_partitioned_and_causal_work_is_balanced(size: int, n: int) -> None:
    length = 2 * size * n
    shards = [
        context_parallel.split_along_context(torch.arange(length).view(1, -1), make_group(shard_rank, size))[0]
        for shard_rank in range(size)
    ]
    assert torch.cat(shards).sort().values.equal(torch.arange(length))
    assert len({int(shard.sum()) for shard in shards}) == 1, "the keys that a rank's queries see"
    assert context_parallel.to_sequence_order(torch.cat(shards), size).equal(torch.arange(length))
    assert context_parallel.to_rank_order(torch.arange(length), size).equal(torch.cat(shards))
    for rank, shard in enumerate(shards):
        assert context_parallel.local_positions(2 * n, make_group(rank, size)).equal(shard)


@given(size=st.integers(1, 4), n=st.integers(1, 6), data=st.data())
def test_runs_within_match_local_positions(size: int, n: int, data: Any) -> None:
    rank = data.draw(st.integers(0, size - 1))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, 2 * n), st.integers(0, 2 * n))))
    group = make_group(rank, size)
    positions = context_parallel.local_positions(2 * n, group)[start:stop].tolist()
    position_by_idx: dict[int, int] = {}
    for run in context_parallel.clip_ranges(context_parallel.token_ranges(2 * n, group), start, stop):
        position_by_idx |= {idx: run.first_position + idx - run.start for idx in range(run.start, run.stop)}
    assert [position_by_idx[idx] for idx in range(stop - start)] == positions


def test_rejects_indivisible_length() -> None:
    with pytest.raises(ValueError, match="a multiple of 2 x --context-parallel-size = 4, got 6"):
        context_parallel.split_along_context(torch.zeros(1, 6), make_group(0, 2))


def test_single_rank_batch_is_unchanged() -> None:
    batch = {"tokens": torch.zeros(2, 3), "segment_ids": None, "is_random": torch.zeros(2)}
    assert context_parallel.split_batch(batch, SINGLE) == batch
    sharded = context_parallel.split_batch(
        {"tokens": torch.arange(8).view(1, 8), "is_random": torch.zeros(2), "none": None}, make_group(1, 2)
    )
    assert sharded["tokens"].tolist() == [[2, 3, 4, 5]] and len(sharded["is_random"]) == 2 and sharded["none"] is None


def run_exchanges(rank: int, size: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return, of each exchange, what it gives and the gradient of what it was given."""
    group = group_of_all_ranks(rank, size)
    results = {}
    exchanges = {
        "gather": lambda x: context_parallel.gather_from_context_region(x, group, dim=2),
        "to heads": lambda x: context_parallel.scatter_heads_gather_sequence(x, group),
        "there and back": lambda x: context_parallel.scatter_sequence_gather_heads(
            context_parallel.scatter_heads_gather_sequence(x, group), group
        ),
    }
    full = random_tensor(1, 2, 4, 4 * size, 3)
    for name, exchange in exchanges.items():
        x = context_parallel.split_along_context(full, group, dim=2).requires_grad_()
        y = exchange(x)
        weights = random_tensor(2 + rank, *y.shape)
        (y * weights).sum().backward()
        results[name] = y.detach(), x.grad
    return results


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_exchanges_restore_sequence_and_reduce_gradients(size: int) -> None:
    full, ranks = random_tensor(1, 2, 4, 4 * size, 3), run_ranks(size, run_exchanges, size)
    gathered_grad = sum(random_tensor(2 + rank, *full.shape) for rank in range(size))
    heads_grad = torch.cat([random_tensor(2 + rank, 2, 4 // size, 4 * size, 3) for rank in range(size)], dim=1)
    for rank, results in enumerate(ranks):
        group = make_group(rank, size)
        assert results["gather"][0].equal(full)
        expected = context_parallel.split_along_context(gathered_grad, group, dim=2)
        torch.testing.assert_close(results["gather"][1], expected, rtol=0, atol=1e-14)  # ranks are summed in any order
        assert results["to heads"][0].equal(full.chunk(size, dim=1)[rank])
        assert results["to heads"][1].equal(context_parallel.split_along_context(heads_grad, group, dim=2))
        assert results["there and back"][0].equal(context_parallel.split_along_context(full, group, dim=2))
        assert results["there and back"][1].equal(random_tensor(2 + rank, 2, 4, 4, 3))

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
from tests.helpers.whole import random, whole_world


def member(rank: int, size: int) -> Group:
    """Return a group without a handle, for what sends nothing."""
    return Group(tuple(range(size)), rank)


@given(size=st.integers(2, 8), n=st.integers(1, 5))
def test_every_token_is_on_one_rank_and_causal_work_is_even(size: int, n: int) -> None:
    length = 2 * size * n
    parts = [
        context_parallel.split_along_context(torch.arange(length).view(1, -1), member(r, size))[0] for r in range(size)
    ]
    assert torch.cat(parts).sort().values.equal(torch.arange(length))
    assert len({int(part.sum()) for part in parts}) == 1, "the keys that a rank's queries see"
    assert context_parallel.in_order(torch.cat(parts), size).equal(torch.arange(length))
    assert context_parallel.rank_by_rank(torch.arange(length), size).equal(torch.cat(parts))
    for rank, part in enumerate(parts):
        assert context_parallel.own_positions(2 * n, member(rank, size)).equal(part)


@given(size=st.integers(1, 4), n=st.integers(1, 6), data=st.data())
def test_runs_of_a_part_are_where_its_tokens_are(size: int, n: int, data: Any) -> None:
    rank = data.draw(st.integers(0, size - 1))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, 2 * n), st.integers(0, 2 * n))))
    group = member(rank, size)
    positions = context_parallel.own_positions(2 * n, group)[start:stop].tolist()
    found: dict[int, int] = {}
    for run in context_parallel.runs_within(context_parallel.runs_of(2 * n, group), start, stop):
        found |= {number: run.first + number - run.start for number in range(run.start, run.stop)}
    assert [found[number] for number in range(stop - start)] == positions


def test_a_length_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="a multiple of 2 x --context-parallel-size = 4, got 6"):
        context_parallel.split_along_context(torch.zeros(1, 6), member(0, 2))


def test_one_rank_has_all_as_it_is() -> None:
    batch = {"tokens": torch.zeros(2, 3), "segment_ids": None, "is_random": torch.zeros(2)}
    assert context_parallel.split_batch(batch, SINGLE) == batch
    cut = context_parallel.split_batch(
        {"tokens": torch.arange(8).view(1, 8), "is_random": torch.zeros(2), "none": None}, member(1, 2)
    )
    assert cut["tokens"].tolist() == [[2, 3, 4, 5]] and len(cut["is_random"]) == 2 and cut["none"] is None


def exchanged(rank: int, size: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return, of each exchange, what it gives and the gradient of what it was given."""
    group = whole_world(rank, size)
    found = {}
    ways = {
        "gather": lambda x: context_parallel.gather_from_context_region(x, group, dim=2),
        "to heads": lambda x: context_parallel.scatter_heads_gather_sequence(x, group),
        "there and back": lambda x: context_parallel.scatter_sequence_gather_heads(
            context_parallel.scatter_heads_gather_sequence(x, group), group
        ),
    }
    whole = random(1, 2, 4, 4 * size, 3)
    for name, way in ways.items():
        x = context_parallel.split_along_context(whole, group, dim=2).requires_grad_()
        y = way(x)
        weights = random(2 + rank, *y.shape)
        (y * weights).sum().backward()
        found[name] = y.detach(), x.grad
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_exchanges_give_the_sequence_and_sum_gradients(size: int) -> None:
    whole, ranks = random(1, 2, 4, 4 * size, 3), run_ranks(size, exchanged, size)
    of_gathered = sum(random(2 + rank, *whole.shape) for rank in range(size))
    of_heads = torch.cat([random(2 + rank, 2, 4 // size, 4 * size, 3) for rank in range(size)], dim=1)
    for rank, found in enumerate(ranks):
        group = member(rank, size)
        assert found["gather"][0].equal(whole)
        wanted = context_parallel.split_along_context(of_gathered, group, dim=2)
        torch.testing.assert_close(found["gather"][1], wanted, rtol=0, atol=1e-14)  # ranks are summed in any order
        assert found["to heads"][0].equal(whole.chunk(size, dim=1)[rank])
        assert found["to heads"][1].equal(context_parallel.split_along_context(of_heads, group, dim=2))
        assert found["there and back"][0].equal(context_parallel.split_along_context(whole, group, dim=2))
        assert found["there and back"][1].equal(random(2 + rank, 2, 4, 4, 3))

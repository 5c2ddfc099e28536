"""The exchange of rows between ranks with experts, and which ranks share them out."""

from __future__ import annotations

import pytest
import torch

from megatron.mpu.expert_parallel import Exchange, block_orders
from megatron.mpu.groups import build_grid
from megatron.mpu.topology import Topology
from tests.helpers.harness import run_ranks

COUNTS = [[2, 1, 3, 1], [1, 0, 2, 5], [1, 4, 0, 0], [0, 0, 0, 0]]
"""Rows that each rank has for each of four experts; on two ranks the received rows must be sorted by expert."""


def run_exchange(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Send rows (sender, expert, number) there and back; return them, those that came, counts, and gradients."""
    grid = build_grid(Topology(pipe=1, data=size, tensor=1, expert=size), rank)
    counts = torch.tensor(COUNTS[rank])
    rows = torch.tensor([[rank, e, i] for e, count in enumerate(COUNTS[rank]) for i in range(count)]).view(-1, 3)
    rows = rows.double().requires_grad_()
    exchange = Exchange.from_counts(counts, grid.expert)
    received = exchange.dispatch(rows)
    returned = exchange.combine(received * 2)
    (returned * torch.arange(1, 1 + len(rows)).unsqueeze(1)).sum().backward()
    assert rows.grad is not None
    return rows.detach(), received.detach(), exchange.counts, returned.detach(), rows.grad


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rows_reach_experts_in_sender_order_and_return(size: int) -> None:
    results = run_ranks(size, run_exchange, size)
    num_local = 4 // size
    for rank, (rows, received, counts, returned, gradient) in enumerate(results):
        experts = range(rank * num_local, (rank + 1) * num_local)
        expected = [[s, e, i] for e in experts for s in range(size) for i in range(COUNTS[s][e])]
        assert received.tolist() == expected
        assert counts.tolist() == [sum(COUNTS[s][e] for s in range(size)) for e in experts]
        assert torch.equal(returned, rows * 2)
        assert torch.equal(gradient, 2.0 * torch.arange(1, 1 + len(rows)).unsqueeze(1).expand(-1, 3))


@pytest.mark.parametrize(("num_senders", "num_experts"), [(1, 1), (1, 5), (3, 1), (4, 3), (7, 16)])
@pytest.mark.parametrize("largest_count", [0, 1, 6])
def test_block_orders_equal_stable_sort_by_expert(num_senders: int, num_experts: int, largest_count: int) -> None:
    generator = torch.Generator().manual_seed(num_senders)
    counts = torch.randint(largest_count + 1, (num_senders, num_experts), generator=generator)
    experts = torch.arange(num_experts).repeat(num_senders).repeat_interleave(counts.reshape(-1))
    order, inverse_order = block_orders(counts, len(experts))
    assert order.tolist() == experts.sort(stable=True).indices.tolist()
    assert inverse_order[order].tolist() == list(range(len(experts)))
    assert order.dtype == inverse_order.dtype == torch.int32


def test_expert_axis_is_within_data_and_context() -> None:
    grid = Topology.from_world_size(16, tensor=2, pipe=1, context=2, expert=4)
    assert grid.data == 4 and grid.axis_sizes() == {"pipe": 1, "data": 4, "tensor": 2, "context": 2, "expert": 4}
    assert grid.expert_groups() == [[0, 2, 4, 6], [8, 10, 12, 14], [1, 3, 5, 7], [9, 11, 13, 15]]
    replicas = grid.expert_groups(same_experts=True)
    assert replicas[:4] == [[0, 8], [2, 10], [4, 12], [6, 14]]
    assert sorted(rank for ranks in replicas for rank in ranks) == list(range(16))
    assert grid.expert_tensor_groups() == grid.groups("tensor") and grid.expert_copies == 2
    with pytest.raises(ValueError, match=r"tensor / expert tensor ranks, got 3 and 4 x 1 x 1 / 1 = 4"):
        Topology.from_world_size(4, tensor=1, pipe=1, expert=3)


def test_expert_groups_of_fewer_tensor_ranks() -> None:
    """The ranks of a stage are split as by Megatron-LM's order tp-cp-ep-dp-pp with the experts' own tensor size."""
    grid = Topology.from_world_size(16, tensor=4, pipe=2, expert=2, expert_tensor=2)
    assert grid.axis_sizes() == {"pipe": 2, "data": 2, "tensor": 4, "expert": 2, "expert_tensor": 2}
    assert grid.expert_tensor_groups() == [[first, first + 1] for first in range(0, 16, 2)]
    assert grid.expert_groups()[:4] == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert grid.expert_groups(same_experts=True)[:4] == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert grid.expert_copies == 2
    unsharded = Topology.from_world_size(8, tensor=2, pipe=1, expert=8, expert_tensor=1)
    assert unsharded.expert_groups() == [list(range(8))] and unsharded.expert_copies == 1
    assert Topology(1, 2, 2, expert_tensor=2) == Topology(1, 2, 2)

"""The exchange of rows between ranks with experts, and which ranks share them out."""

from __future__ import annotations

import pytest
import torch

from megatron.mpu.expert_parallel import Exchange
from megatron.mpu.groups import build_grid
from megatron.mpu.topology import Topology
from tests.helpers.harness import run_ranks

COUNTS = [[2, 1, 3, 1], [1, 0, 2, 5], [1, 4, 0, 0], [0, 0, 0, 0]]
"""Rows that each rank has for each of four experts; on two ranks the received rows must be sorted by expert."""


def exchanged(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Send rows (sender, expert, number) there and back; return them, those that came, counts, and gradients."""
    grid = build_grid(Topology(pipe=1, data=size, tensor=1, expert=size), rank)
    counts = torch.tensor(COUNTS[rank])
    rows = torch.tensor([[rank, e, i] for e, number in enumerate(COUNTS[rank]) for i in range(number)]).view(-1, 3)
    rows = rows.double().requires_grad_()
    exchange = Exchange.of(counts, grid.expert)
    came = exchange.send(rows)
    back = exchange.give_back(came * 2)
    (back * torch.arange(1, 1 + len(rows)).unsqueeze(1)).sum().backward()
    assert rows.grad is not None
    return rows.detach(), came.detach(), exchange.counts, back.detach(), rows.grad


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rows_come_to_their_experts_in_the_order_of_senders_and_go_back(size: int) -> None:
    found = run_ranks(size, exchanged, size)
    own = 4 // size
    for rank, (rows, came, counts, back, gradient) in enumerate(found):
        experts = range(rank * own, (rank + 1) * own)
        wanted = [[s, e, i] for e in experts for s in range(size) for i in range(COUNTS[s][e])]
        assert came.tolist() == wanted
        assert counts.tolist() == [sum(COUNTS[s][e] for s in range(size)) for e in experts]
        assert torch.equal(back, rows * 2)
        assert torch.equal(gradient, 2.0 * torch.arange(1, 1 + len(rows)).unsqueeze(1).expand(-1, 3))


def test_the_expert_axis_lies_within_data_and_context() -> None:
    grid = Topology.of_world(16, tensor=2, pipe=1, context=2, expert=4)
    assert grid.data == 4 and grid.sizes() == {"pipe": 1, "data": 4, "tensor": 2, "context": 2, "expert": 4}
    assert grid.expert_groups() == [[0, 2, 4, 6], [8, 10, 12, 14], [1, 3, 5, 7], [9, 11, 13, 15]]
    replicas = grid.expert_groups(of_replicas=True)
    assert replicas[:4] == [[0, 8], [2, 10], [4, 12], [6, 14]]
    assert sorted(rank for ranks in replicas for rank in ranks) == list(range(16))
    with pytest.raises(ValueError, match=r"must divide the data x context ranks, got 3 and 4 x 1 = 4"):
        Topology.of_world(4, tensor=1, pipe=1, expert=3)

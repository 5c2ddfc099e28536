"""Expert parallelism: rows are sent to the ranks that hold their experts, and the experts' outputs are sent back.

An expert group consists of n consecutive ranks along the data and context axes. Its rank i holds experts i E/n to
(i + 1) E/n of each layer, and its own tokens. The weights of experts are replicated on ranks that are n apart; the
optimizer reduces their gradients over these replicas only (``set_expert``).

| function | forward | backward |
|---|---|---|
| `Exchange.send` | all-to-all of rows by expert, then sorting by expert | `Exchange.give_back` |
| `Exchange.give_back` | sorting by sender, then all-to-all | `Exchange.send` |

Source: Lepikhin et al. 2020, "GShard", section 3.2; Megatron-LM's order of axes (tp-cp-ep-dp-pp), in which the expert
axis is within data x context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.mpu.groups import Group
from megatron.torch_compat import all_gather_single
from tds.gradients import set_reduced_apart


def set_expert(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Record that ``parameter`` belongs to an expert that not all ranks of the data-parallel group hold."""
    return set_reduced_apart(parameter)


@dataclass(frozen=True)
class Exchange:
    """Routing of the rows of one layer and one micro-batch between the expert-parallel ranks.

    Attributes:
        group: expert-parallel group.
        sends, receives: number of rows sent to and received from each rank.
        order: indices that sort the received rows, which arrive in the order of senders, by expert.
        place: position of each received row after sorting: the inverse of ``order``.
        counts: number of rows of each of this rank's experts, int64.
    """

    group: Group
    sends: list[int]
    receives: list[int]
    order: torch.Tensor
    place: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, counts: torch.Tensor, group: Group) -> Exchange:
        """Return the exchange of rows with ``counts`` [E] rows per expert. Collective; the host waits for it."""
        all_counts = counts.new_empty(group.size, len(counts))
        all_gather_single(all_counts.view(-1), counts.contiguous(), group=group.handle)
        by_rank = all_counts.unflatten(1, (group.size, -1))  # [sender, receiver, E/n]
        local_counts = by_rank[:, group.rank]  # [sender, E/n]
        sends, receives = by_rank[group.rank].sum(1).tolist(), local_counts.sum(1).tolist()
        expert_ids = torch.arange(local_counts.shape[1], device=counts.device).repeat(group.size)
        experts = expert_ids.repeat_interleave(local_counts.reshape(-1), output_size=sum(receives))
        order = experts.sort(dim=0, stable=True).indices
        position = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        return cls(group, sends, receives, order, position, local_counts.sum(0))

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """Send ``rows``, sorted by expert; return the rows of this rank's experts, sorted by expert. Collective."""
        return _Send.apply(rows, self)

    def give_back(self, rows: torch.Tensor) -> torch.Tensor:
        """Send outputs of experts back to the ranks of their rows. Collective.

        Returns:
            The outputs of the rows that this rank passed to ``send``, in the same order.
        """
        return _GiveBack.apply(rows, self)

    def forth(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply ``send`` without autograd."""
        return _exchanged(rows, self.sends, self.receives, self.group).index_select(0, self.order)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply ``give_back`` without autograd."""
        return _exchanged(rows.index_select(0, self.place), self.receives, self.sends, self.group)


def _exchanged(rows: torch.Tensor, sends: list[int], receives: list[int], group: Group) -> torch.Tensor:
    received = rows.new_empty(sum(receives), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group.handle)
    return received


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.forth(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.exchange.back(grads[0]), None


class _GiveBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.back(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.exchange.forth(grads[0]), None

"""Expert parallelism: rows go to the ranks that have their experts, and what these make of them comes back.

Rank i of the expert group, which are neighbours on the data and context axes, has experts i E/n to (i + 1) E/n of each
layer, and tokens of its own. Weights of experts have replicas on the ranks that lie n apart; their gradients are summed
over these alone, by the optimizer (``set_expert``).

| function | forward | backward |
|---|---|---|
| `Exchange.send` | all-to-all of rows by expert, then sorted by expert | the next one |
| `Exchange.give_back` | sorted by sender, then all-to-all | the one before |

Source: Lepikhin et al. 2020, "GShard", section 3.2; Megatron-LM's order of axes (tp-cp-ep-dp-pp), in which the expert
axis lies within data x context.
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
    """Record that ``parameter`` is of an expert that ranks of the data group do not all have."""
    return set_reduced_apart(parameter)


@dataclass(frozen=True)
class Exchange:
    """Which rows go where, of one layer and one micro-batch.

    Attributes:
        group: the expert-parallel ranks.
        sends, receives: rows for and of each of them.
        order: which of the received rows, which come sender by sender, is at each place by expert.
        place: where among these each received row is.
        counts: rows of each of this rank's experts, int64.
    """

    group: Group
    sends: list[int]
    receives: list[int]
    order: torch.Tensor
    place: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, counts: torch.Tensor, group: Group) -> Exchange:
        """Return the exchange of rows of which ``counts`` [E] go to each expert. Collective; the host waits for it."""
        every = counts.new_empty(group.size, len(counts))
        all_gather_single(every.view(-1), counts.contiguous(), group=group.handle)
        by_rank = every.unflatten(1, (group.size, -1))  # [sender, receiver, E/n]
        own = by_rank[:, group.rank]  # [sender, E/n]
        sends, receives = by_rank[group.rank].sum(1).tolist(), own.sum(1).tolist()
        numbers = torch.arange(own.shape[1], device=counts.device).repeat(group.size)
        experts = numbers.repeat_interleave(own.reshape(-1), output_size=sum(receives))
        order = experts.sort(dim=0, stable=True).indices
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        return cls(group, sends, receives, order, place, own.sum(0))

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of this rank's experts, the first expert's first, of ``rows`` by expert. Collective."""
        return _Send.apply(rows, self)

    def give_back(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what has become of the rows that this rank has sent, in their order. Collective."""
        return _GiveBack.apply(rows, self)

    def forth(self, rows: torch.Tensor) -> torch.Tensor:
        """Do as ``send``, without a graph."""
        return _exchanged(rows, self.sends, self.receives, self.group).index_select(0, self.order)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Do as ``give_back``, without a graph."""
        return _exchanged(rows.index_select(0, self.place), self.receives, self.sends, self.group)


def _exchanged(rows: torch.Tensor, sends: list[int], receives: list[int], group: Group) -> torch.Tensor:
    found = rows.new_empty(sum(receives), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), receives, sends, group=group.handle)
    return found


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

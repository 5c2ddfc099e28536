"""Expert parallelism: rows are sent to the ranks that hold their experts, and the experts' outputs are sent back.

An expert group consists of n consecutive ranks along the data and context axes. Its rank i holds experts i E/n to (i +
1) E/n of each layer, and its own tokens. Expert weights are replicated on ranks that are n apart; the optimizer reduces
their gradients over these replicas only (``set_expert``).

If experts are sharded over fewer tensor ranks than other layers (--expert-tensor-parallel-size), each shard of an
expert has several holders in a tensor group, which process different shards of the sequence. These ranks come first in
the expert groups and in the groups of replicas (``Topology.expert_groups``).

| function | forward | backward |
|---|---|---|
| `Exchange.dispatch` | all-to-all of rows by expert, then sorting by expert | `Exchange.combine` |
| `Exchange.combine` | sorting by sender, then all-to-all | `Exchange.dispatch` |

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
from tds.gradients import set_reduced_by_optimizer


def set_expert(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Record that ``parameter`` belongs to an expert that not all data-parallel ranks hold."""
    return set_reduced_by_optimizer(parameter)


@dataclass(frozen=True)
class Exchange:
    """Row routing for one layer and one micro-batch between the expert-parallel ranks.

    Attributes:
        group: expert-parallel group.
        send_counts, receive_counts: rows sent to and received from each rank.
        order: int32 indices that sort the received rows, which arrive in sender order, by expert.
        inverse_order: position of each received row after sorting, int32: the inverse of ``order``.
        counts: rows per local expert, int64.
        row_counts: ``counts`` on the host.
    """

    group: Group
    send_counts: list[int]
    receive_counts: list[int]
    order: torch.Tensor
    inverse_order: torch.Tensor
    counts: torch.Tensor
    row_counts: list[int]

    @classmethod
    def from_counts(cls, counts: torch.Tensor, group: Group) -> Exchange:
        """Set up an exchange with ``counts`` [E] rows per expert. Collective; the host waits for it once."""
        all_counts = counts.new_empty(group.size, len(counts))
        all_gather_single(all_counts.view(-1), counts.contiguous(), group=group.handle)
        counts_by_rank = all_counts.unflatten(1, (group.size, -1))  # [sender, receiver, E/n]
        local_counts = counts_by_rank[:, group.rank]  # [sender, E/n]
        host_counts = torch.cat([counts_by_rank[group.rank].sum(1), local_counts.sum(1), local_counts.sum(0)]).tolist()
        send_counts, receive_counts = host_counts[: group.size], host_counts[group.size : 2 * group.size]
        order, inverse_order = block_orders(local_counts, sum(receive_counts))
        return cls(
            group, send_counts, receive_counts, order, inverse_order, local_counts.sum(0), host_counts[2 * group.size :]
        )

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        """Send ``rows``, sorted by expert; return the local experts' rows, sorted by expert. Collective."""
        return _Dispatch.apply(rows, self)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Send expert outputs back to the senders. Collective.

        Returns:
            The outputs for the rows that this rank passed to ``dispatch``, in the same order.
        """
        return _Combine.apply(rows, self)

    def dispatch_without_grad(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply ``dispatch`` without autograd."""
        return _all_to_all(rows, self.send_counts, self.receive_counts, self.group).index_select(0, self.order)

    def combine_without_grad(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply ``combine`` without autograd."""
        return _all_to_all(rows.index_select(0, self.inverse_order), self.receive_counts, self.send_counts, self.group)


def block_orders(counts: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the permutation of blocks from (sender, expert) to (expert, sender) order, and the inverse.

    All rows in a block move by the same distance.

    Args:
        counts: rows per block, [sender, expert].
        num_rows: total row count, known on the host.

    Shapes:
        outputs int32 [num_rows] each
    """
    by_sender, by_expert = counts.reshape(-1), counts.t().reshape(-1)
    starts = (by_sender.cumsum(0) - by_sender).view_as(counts)  # [sender, expert]
    new_starts = (by_expert.cumsum(0) - by_expert).view_as(counts.t()).t()
    moves = (new_starts - starts).to(torch.int32)
    moves_by_sender = moves.reshape(-1).repeat_interleave(by_sender, output_size=num_rows)
    moves_by_expert = moves.t().reshape(-1).repeat_interleave(by_expert, output_size=num_rows)
    positions = torch.arange(num_rows, dtype=torch.int32, device=counts.device)
    return positions - moves_by_expert, positions + moves_by_sender


def _all_to_all(rows: torch.Tensor, send_counts: list[int], receive_counts: list[int], group: Group) -> torch.Tensor:
    received = rows.new_empty(sum(receive_counts), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receive_counts, send_counts, group=group.handle)
    return received


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.dispatch_without_grad(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.exchange.combine_without_grad(grads[0]), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.combine_without_grad(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.exchange.dispatch_without_grad(grads[0]), None

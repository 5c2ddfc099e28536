"""Context parallelism: the distribution of a sequence's tokens over ranks, and the exchanges that attention needs.

A sequence is split into 2c chunks of n = s / 2c tokens. Rank i of the context group holds chunks i and 2c-1-i: the
first chunk attends to few keys and the last one to the most, so that causal work is balanced. Only attention needs
other ranks' tokens; the rest of a layer processes local tokens.

| function | forward | backward |
|---|---|---|
| `split_along_context` | this rank's chunks | none: used outside of graphs |
| `gather_from_context_region` | all-gather of the full sequence, in sequence order | reduce-scatter |
| `scatter_heads_gather_sequence` | all-to-all: all tokens of 1/c of the heads | `scatter_sequence_gather_heads` |
| `scatter_sequence_gather_heads` | all-to-all: this rank's tokens of all heads | `scatter_heads_gather_sequence` |

All but the first are collective over ``group``. All are the identity if it has one rank.

Source: Llama Team 2024, "The Llama 3 herd of models", section 3.3.2 (all-gather, 2c chunks); Jacobs et al. 2023,
"DeepSpeed Ulysses" (all-to-all).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.mpu.groups import Group
from megatron.mpu.topology import chunk_indices
from megatron.torch_compat import all_gather_single, reduce_scatter_single


class TokenRange(NamedTuple):
    """Consecutive tokens: local indices ``start`` to ``stop``, positions in the sequence from ``first_position`` on."""

    start: int
    stop: int
    first_position: int


def token_ranges(length: int, group: Group) -> tuple[TokenRange, ...]:
    """Return the ranges for this rank's ``length`` tokens: two chunks, or one range without context parallelism."""
    if group.size == 1:
        return (TokenRange(0, length, 0),)
    n = length // 2
    early_idx, late_idx = chunk_indices(group.rank, group.size)
    return TokenRange(0, n, early_idx * n), TokenRange(n, length, late_idx * n)


def clip_ranges(ranges: tuple[TokenRange, ...], start: int, stop: int) -> Iterator[TokenRange]:
    """Clip ``ranges`` to local indices ``start`` to ``stop``, relative to ``start``."""
    for token_range in ranges:
        low, high = max(token_range.start, start), min(token_range.stop, stop)
        if low < high:
            yield TokenRange(low - start, high - start, token_range.first_position + low - token_range.start)


def local_positions(length: int, group: Group, device: torch.device | None = None) -> torch.Tensor:
    """Return the full-sequence positions of this rank's ``length`` tokens: int64 [length]."""
    token_runs = token_ranges(length, group)
    ranges = [
        torch.arange(
            token_range.first_position, token_range.first_position + token_range.stop - token_range.start, device=device
        )
        for token_range in token_runs
    ]
    return ranges[0] if len(ranges) == 1 else torch.cat(ranges)


def split_along_context(x: torch.Tensor, group: Group, dim: int = 1) -> torch.Tensor:
    """Concatenate this rank's two chunks of ``x`` along ``dim``.

    Raises:
        ValueError: the size along ``dim`` is not a multiple of twice the group size.
    """
    if group.size == 1:
        return x
    size = x.shape[dim]
    if size % (2 * group.size):
        raise ValueError(
            f"the sequence length must be a multiple of 2 x --context-parallel-size = {2 * group.size}, got {size}. "
            "Choose another length or another --context-parallel-size"
        )
    chunks = x.chunk(2 * group.size, dim)
    return torch.cat([chunks[idx] for idx in chunk_indices(group.rank, group.size)], dim)


def split_batch(batch: Mapping[str, torch.Tensor | None], group: Group) -> dict[str, torch.Tensor | None]:
    """Select this rank's tokens in each tensor [b, s, ...]; other tensors and None are unchanged."""
    is_full = group.size == 1
    return {
        name: x if is_full or x is None or x.dim() < 2 else split_along_context(x, group) for name, x in batch.items()
    }


def gather_from_context_region(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Gather the full sequence along ``dim``, in sequence order; gradients are reduce-scattered."""
    if group.size == 1:
        return x
    return _Gather.apply(x.movedim(dim, 0), group).movedim(0, dim)


def scatter_heads_gather_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Exchange tokens for heads: the result has the full sequence for this rank's share of the heads.

    Shapes:
        x      [b, a, s/c, d]
        output [b, a/c, s, d]
    """
    return x if group.size == 1 else _ToHeads.apply(x, group)


def scatter_sequence_gather_heads(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Exchange heads for tokens: the result has all heads for this rank's tokens.

    Shapes:
        x      [b, a/c, s, d]
        output [b, a, s/c, d]
    """
    return x if group.size == 1 else _ToSequence.apply(x, group)


def gather_rows(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Gather all ranks' rows in sequence order, without autograd. Collective."""
    if group.size == 1:
        return x
    x = x.contiguous()
    gathered = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    all_gather_single(gathered, x, group=group.handle)
    return to_sequence_order(gathered, group.size)


def to_sequence_order(x: torch.Tensor, size: int) -> torch.Tensor:
    """Reorder rows [s, ...] from rank order to sequence order."""
    order = chunk_indices_by_rank(size)
    chunks = x.chunk(2 * size)
    return torch.cat([chunks[order.index(idx)] for idx in range(2 * size)])


def to_rank_order(x: torch.Tensor, size: int) -> torch.Tensor:
    """Reorder rows [s, ...] from sequence order to rank order: the inverse of ``to_sequence_order``."""
    chunks = x.chunk(2 * size)
    return torch.cat([chunks[idx] for idx in chunk_indices_by_rank(size)])


def chunk_indices_by_rank(size: int) -> list[int]:
    """Return all chunk indices in rank order."""
    return [idx for rank in range(size) for idx in chunk_indices(rank, size)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return gather_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = to_rank_order(grads[0], ctx.group.size)
        shard = grad.new_empty((grad.shape[0] // ctx.group.size, *grad.shape[1:]))
        reduce_scatter_single(shard, grad, group=ctx.group.handle)
        return shard, None


def _to_heads(x: torch.Tensor, group: Group) -> torch.Tensor:
    by_receiver = x.unflatten(1, (group.size, -1)).permute(1, 3, 0, 2, 4)  # [c, s/c, b, a/c, d]
    rows = _exchange(by_receiver, group).flatten(0, 1)  # [s, b, a/c, d], in rank order
    return to_sequence_order(rows, group.size).permute(1, 2, 0, 3)


def _to_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    rows = to_rank_order(x.permute(2, 0, 1, 3), group.size)  # [s, b, a/c, d]
    by_sender = _exchange(rows.unflatten(0, (group.size, -1)), group)  # [c, s/c, b, a/c, d]
    return by_sender.permute(2, 0, 3, 1, 4).flatten(1, 2)


def _exchange(x: torch.Tensor, group: Group) -> torch.Tensor:
    """All-to-all of ``x``: [c, ...] by receiver becomes [c, ...] by sender."""
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group.handle)
    return received


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _to_heads(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _to_sequence(grads[0], ctx.group), None


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _to_sequence(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _to_heads(grads[0], ctx.group), None

"""Context parallelism: which tokens of a sequence a rank has, and the exchanges that attention needs.

A sequence is cut into 2c chunks of n = s / 2c tokens, of which rank i of the context group has chunks i and 2c-1-i: the
first sees few keys and the last sees most, so that causal work is even. All else of a layer sees its own tokens alone.

| function | forward | backward |
|---|---|---|
| `split_along_context` | own chunks | none: it cuts what is no part of a graph |
| `gather_from_context_region` | all-gather of the sequence, in its order | reduce-scatter |
| `scatter_heads_gather_sequence` | all-to-all: all tokens of 1/c of the heads | the next one |
| `scatter_sequence_gather_heads` | all-to-all: own tokens of all heads | the one before |

All are collective over ``group``, but for the first, and the identity where it has one rank.

Source: Llama Team 2024, "The Llama 3 herd of models", section 3.3.2 (all-gather, 2c chunks); Jacobs et al. 2023,
"DeepSpeed Ulysses" (all-to-all).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.mpu.groups import Group
from megatron.mpu.topology import chunks_of
from megatron.torch_compat import all_gather_single, reduce_scatter_single


class Run(NamedTuple):
    """Neighbouring tokens of a rank: numbers ``start`` to ``stop`` of its own are ``first`` and so on of the whole."""

    start: int
    stop: int
    first: int


def runs_of(length: int, group: Group) -> tuple[Run, ...]:
    """Return the runs of this rank's ``length`` tokens: its two chunks; one without context parallelism."""
    if group.size == 1:
        return (Run(0, length, 0),)
    n = length // 2
    early, late = chunks_of(group.rank, group.size)
    return Run(0, n, early * n), Run(n, length, late * n)


def runs_within(runs: tuple[Run, ...], start: int, stop: int) -> Iterator[Run]:
    """Yield the runs of tokens ``start`` to ``stop`` of those that a rank has, counted from ``start``."""
    for run in runs:
        low, high = max(run.start, start), min(run.stop, stop)
        if low < high:
            yield Run(low - start, high - start, run.first + low - run.start)


def own_positions(length: int, group: Group, device: torch.device | None = None) -> torch.Tensor:
    """Return where in the whole sequence this rank's ``length`` tokens are: int64 [length]."""
    runs = runs_of(length, group)
    ranges = [torch.arange(run.first, run.first + run.stop - run.start, device=device) for run in runs]
    return ranges[0] if len(ranges) == 1 else torch.cat(ranges)


def split_along_context(x: torch.Tensor, group: Group, dim: int = 1) -> torch.Tensor:
    """Return this rank's two chunks of ``x`` along ``dim``, one behind the other.

    Raises:
        ValueError: the size is no multiple of twice the group's.
    """
    if group.size == 1:
        return x
    size = x.shape[dim]
    if size % (2 * group.size):
        raise ValueError(
            f"a sequence must be a multiple of 2 x --context-parallel-size = {2 * group.size}, got {size}. Choose a "
            "length that it divides"
        )
    chunks = x.chunk(2 * group.size, dim)
    return torch.cat([chunks[number] for number in chunks_of(group.rank, group.size)], dim)


def split_batch(batch: Mapping[str, torch.Tensor | None], group: Group) -> dict[str, torch.Tensor | None]:
    """Return ``batch`` with the tokens of each tensor [b, s, ...] that this rank has; others and None stay."""
    is_whole = group.size == 1
    return {
        name: x if is_whole or x is None or x.dim() < 2 else split_along_context(x, group) for name, x in batch.items()
    }


def gather_from_context_region(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Return the whole sequence along ``dim``; gradients are summed, and each rank has those of its tokens."""
    if group.size == 1:
        return x
    return _Gather.apply(x.movedim(dim, 0), group).movedim(0, dim)


def scatter_heads_gather_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the whole sequence of this rank's share of the heads.

    Shapes:
        x      [b, a, s/c, d]
        output [b, a/c, s, d]
    """
    return x if group.size == 1 else _ToHeads.apply(x, group)


def scatter_sequence_gather_heads(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's tokens of all heads.

    Shapes:
        x      [b, a/c, s, d]
        output [b, a, s/c, d]
    """
    return x if group.size == 1 else _ToSequence.apply(x, group)


def gather_rows(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the rows of all ranks in the order of the sequence; no gradient flows. Collective."""
    if group.size == 1:
        return x
    x = x.contiguous()
    whole = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    all_gather_single(whole, x, group=group.handle)
    return in_order(whole, group.size)


def in_order(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return rows [s, ...], which come rank by rank, in the order of the sequence."""
    places = by_rank(size)
    chunks = x.chunk(2 * size)
    return torch.cat([chunks[places.index(number)] for number in range(2 * size)])


def rank_by_rank(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return rows [s, ...] of the sequence rank by rank: the transpose of ``in_order``."""
    chunks = x.chunk(2 * size)
    return torch.cat([chunks[number] for number in by_rank(size)])


def by_rank(size: int) -> list[int]:
    """Return the numbers of all chunks, rank by rank."""
    return [number for rank in range(size) for number in chunks_of(rank, size)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return gather_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        whole = rank_by_rank(grads[0], ctx.group.size)
        part = whole.new_empty((whole.shape[0] // ctx.group.size, *whole.shape[1:]))
        reduce_scatter_single(part, whole, group=ctx.group.handle)
        return part, None


def _to_heads(x: torch.Tensor, group: Group) -> torch.Tensor:
    by_receiver = x.unflatten(1, (group.size, -1)).permute(1, 3, 0, 2, 4)  # [c, s/c, b, a/c, d]
    rows = _exchange(by_receiver, group).flatten(0, 1)  # [s, b, a/c, d], rank by rank
    return in_order(rows, group.size).permute(1, 2, 0, 3)


def _to_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    rows = rank_by_rank(x.permute(2, 0, 1, 3), group.size)  # [s, b, a/c, d]
    by_sender = _exchange(rows.unflatten(0, (group.size, -1)), group)  # [c, s/c, b, a/c, d]
    return by_sender.permute(2, 0, 3, 1, 4).flatten(1, 2)


def _exchange(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return what each rank has for this one: [c, ...] by receiver to [c, ...] by sender."""
    x = x.contiguous()
    found = torch.empty_like(x)
    dist.all_to_all_single(found, x, group=group.handle)
    return found


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

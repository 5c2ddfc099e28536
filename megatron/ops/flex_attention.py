"""Attention within documents by where each begins, by torch's ``flex_attention``: what FlashAttention has no way for.

A query sees neighbouring keys, from one place to another. So of each block of queries the blocks of keys that one of
them sees, and among these the blocks that all of them see, follow from the least and the greatest of these places.
Nothing of s x s is made and the host reads nothing; lists of blocks have 4 (s / 128)^2 numbers a sample.

It is Triton's on CUDA. On a CPU it makes all scores and has no backward: there it serves to be looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.plans import plan_of
from megatron.torch_compat import flexible_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries of a block, and keys. Sequences are padded to whole ones: with a rest the gradients of torch's kernel may be
NaN where scores are changed (pytorch issue 153799), and fewer queries than a block go to a kernel without backward."""
LEAST, MOST = 16, 256
"""Size of heads: products in Triton have at least 16 columns, and more than 256 fit no GPU's shared memory."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Plan(NamedTuple):
    """What all layers of a stage share of a micro-batch: which blocks are seen, and where queries stand, [s]."""

    blocks: BlockMask
    positions: Tensor


def takes_blocks(dtype: torch.dtype, head_size: int) -> bool:
    """Return whether the kernel is for such heads."""
    return dtype in DTYPES and LEAST <= head_size <= MOST


def attention_by_blocks(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, stops: Tensor | None = None, *, first: int = 0,
    window: int = 0, scale: float | None = None, cap: float = 0.0, slopes: list[float] | None = None,
) -> Tensor:  # fmt: skip
    """Return what ``document_attention`` does, with all that it takes.

    Source: Dong et al. 2024, "Flex Attention: a programming model for generating optimized attention kernels".
    """
    s = query.shape[2]
    plan = plan_of(_plan, starts, stops, key.shape[2], first, window)
    context = flexible_attention(
        *(_whole_blocks(x) for x in (query, key, value)),
        score_mod=_scores(cap, _slopes(query, slopes), plan.positions) if cap or slopes is not None else None,
        block_mask=plan.blocks,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return context[:, :, :s]


def _whole_blocks(x: Tensor) -> Tensor:
    """Return ``x`` [b, a, s, d] with zeros behind, so that s is a multiple of ``BLOCK``."""
    behind = -x.shape[2] % BLOCK
    return F.pad(x, (0, 0, 0, behind)) if behind else x


def _scores(cap: float, slopes: Tensor | None, positions: Tensor) -> Callable[..., Tensor]:
    """Return what becomes of a score; a bias is added behind the cap."""

    def changed(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if cap:
            score = cap * torch.tanh(score / cap)
        return score if slopes is None else score + slopes[head] * (key - positions[query])

    return changed


def _slopes(query: Tensor, slopes: list[float] | None) -> Tensor | None:
    if slopes is None:
        return None
    return _slopes_on(tuple(slopes), torch.promote_types(query.dtype, torch.float32), query.device)


@torch.compiler.assume_constant_result  # in a graph, too, they are sent to the device once
def _slopes_on(slopes: tuple[float, ...], dtype: torch.dtype, place: torch.device) -> Tensor:
    return _sent(slopes, dtype, place)


@functools.cache
def _sent(slopes: tuple[float, ...], dtype: torch.dtype, place: torch.device) -> Tensor:
    return torch.tensor(slopes, dtype=dtype, device=place)


def _plan(starts: Tensor, stops: Tensor | None, num_keys: int, first: int, window: int) -> _Plan:
    """Return the blocks that queries see which stand at ``first`` and on."""
    from torch.nn.attention.flex_attention import BlockMask  # not ahead of need: it loads torch's compiler

    positions = torch.arange(first, first + starts.shape[1], dtype=torch.int32, device=starts.device).unsqueeze(0)
    low = torch.maximum(starts, positions - window) if window else starts.clone()  # a plan must not hold its key
    high = (positions + 1).expand_as(starts).contiguous() if stops is None else stops.clone()
    low, high, positions = (_as_the_last(x) for x in (low, high, positions))  # queries that nobody asks for

    def is_seen(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= low[b, query]) & (key < high[b, query])

    blocks = BlockMask.from_kv_blocks(
        *_blocks_seen(low, high, -(-num_keys // BLOCK)), BLOCK_SIZE=BLOCK, mask_mod=is_seen
    )
    return _Plan(blocks, positions[0])


def _as_the_last(x: Tensor) -> Tensor:
    """Return ``x`` [b, s] with its last column again behind it, so that s is a multiple of ``BLOCK``."""
    behind = -x.shape[1] % BLOCK
    return torch.cat((x, x[:, -1:].expand(-1, behind)), dim=1) if behind else x


def _blocks_seen(low: Tensor, high: Tensor, num_blocks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the blocks of keys that some queries of a block see but not all, and those that all of them see.

    Shapes:
        low, high int32 [b, s], of each query the first key that it sees, and one more than the last
        output    of both int32 [b, 1, s / BLOCK], how many, and [b, 1, s / BLOCK, num_blocks], which; these come first
    """
    lows, highs = (x.unflatten(1, (-1, BLOCK)) for x in (low, high))  # 2 x [b, s / BLOCK, BLOCK]
    begin, end = lows.amin(2) // BLOCK, -(-highs.amax(2) // BLOCK)
    all_from = -(-lows.amax(2) // BLOCK)
    num_all = (highs.amin(2) // BLOCK - all_from).clamp(min=0)
    num_some = end - begin - num_all
    begin, all_from, skipped = (x.unsqueeze(2) for x in (begin, all_from, num_all))
    columns = torch.arange(num_blocks, dtype=torch.int32, device=low.device)
    which_all = all_from + columns
    which_some = begin + columns
    which_some = torch.where(which_some < all_from, which_some, which_some + skipped)
    last = num_blocks - 1  # what is behind those that count must be places, too
    found = (num_some, which_some.clamp(max=last), num_all, which_all.clamp(max=last))
    some, some_of, all_, all_of = (x.unsqueeze(1).contiguous() for x in found)
    return some, some_of, all_, all_of

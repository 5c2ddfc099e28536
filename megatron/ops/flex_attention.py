"""Attention within documents by torch's ``flex_attention``, for the cases that FlashAttention does not support.

Each query sees a range of keys. For each block of queries, the smallest and largest bounds of these ranges determine
two lists of key blocks: blocks that at least one query sees, and blocks that every query sees in full. Nothing of size
s x s is allocated, and the host reads nothing from the device. The lists of blocks have 4 (s / 128)^2 elements per
sample.

On CUDA the kernel is generated with Triton. On a CPU, flex_attention computes all scores and has no backward, so that
it only serves for inspection.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.plans import get_plan
from megatron.torch_compat import flexible_attention, flexible_attention_with_lse

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Number of queries and of keys of a block.

Sequences are padded to full blocks. Otherwise the gradients of torch's kernel may be NaN if scores are modified
(pytorch issue 153799), and fewer queries than a block would be passed to a kernel without backward.
"""
MIN_HEAD_SIZE, MAX_HEAD_SIZE = 16, 256
"""Sizes of heads: products in Triton have at least 16 columns, and more than 256 do not fit into shared memory."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Plan(NamedTuple):
    """Data that all layers of a stage share for a micro-batch: visible blocks, and query positions [s]."""

    blocks: BlockMask
    positions: Tensor


def supports_flex(dtype: torch.dtype, head_size: int) -> bool:
    """Return True if the kernel supports this dtype and head size."""
    return dtype in DTYPES and MIN_HEAD_SIZE <= head_size <= MAX_HEAD_SIZE


def flex_document_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, stops: Tensor | None = None, *, first: int = 0,
    window: int = 0, scale: float | None = None, cap: float = 0.0, slopes: list[float] | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``document_attention``, with all options.

    The kernel does not support sinks. It returns the log-sum-exp of a query's scores, from which a sink's effect
    follows: the denominator of all probabilities becomes ``exp(lse) + exp(sink)``.

    Source: Dong et al. 2024, "Flex Attention: a programming model for generating optimized attention kernels".
    """
    s = query.shape[2]
    plan = get_plan(_plan, starts, stops, key.shape[2], first, window)
    padded = tuple(_pad_to_blocks(x) for x in (query, key, value))
    options: dict[str, Any] = {
        "score_mod": _score_mod(cap, _slopes(query, slopes), plan.positions) if cap or slopes is not None else None,
        "block_mask": plan.blocks,
        "scale": scale,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    if sinks is None:
        return flexible_attention(*padded, **options)[:, :, :s]
    context, lse = flexible_attention_with_lse(*padded, **options)
    kept = torch.sigmoid(lse - sinks.to(lse.dtype).view(-1, 1))  # [b, a/t, s], exp(lse) / (exp(lse) + exp(sink))
    return (context * kept.unsqueeze(-1)).to(context.dtype)[:, :, :s]


def _pad_to_blocks(x: Tensor) -> Tensor:
    """Pad ``x`` [b, a, s, d] with zeros at the end, so that s is a multiple of ``BLOCK``."""
    padding = -x.shape[2] % BLOCK
    return F.pad(x, (0, 0, 0, padding)) if padding else x


def _score_mod(cap: float, slopes: Tensor | None, positions: Tensor) -> Callable[..., Tensor]:
    """Build a function that applies the cap to a score, then adds the bias."""

    def modify_score(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if cap:
            score = cap * torch.tanh(score / cap)
        return score if slopes is None else score + slopes[head] * (key - positions[query])

    return modify_score


def _slopes(query: Tensor, slopes: list[float] | None) -> Tensor | None:
    if slopes is None:
        return None
    return _slopes_on_device(tuple(slopes), torch.promote_types(query.dtype, torch.float32), query.device)


@torch.compiler.assume_constant_result  # copied to the device only once, even in a compiled graph
def _slopes_on_device(slopes: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _slopes_tensor(slopes, dtype, device)


@functools.cache
def _slopes_tensor(slopes: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(slopes, dtype=dtype, device=device)


def _plan(starts: Tensor, stops: Tensor | None, num_keys: int, first: int, window: int) -> _Plan:
    from torch.nn.attention.flex_attention import BlockMask  # imported on use: it loads torch's compiler

    positions = torch.arange(first, first + starts.shape[1], dtype=torch.int32, device=starts.device).unsqueeze(0)
    # clones, because a plan must not refer to its cache key
    low = torch.maximum(starts, positions - window) if window else starts.clone()
    high = (positions + 1).expand_as(starts).contiguous() if stops is None else stops.clone()
    # padded queries repeat the last one; their results are not used
    low, high, positions = (_pad_with_last(x) for x in (low, high, positions))

    def is_seen(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= low[b, query]) & (key < high[b, query])

    blocks = BlockMask.from_kv_blocks(
        *_visible_blocks(low, high, -(-num_keys // BLOCK)), BLOCK_SIZE=BLOCK, mask_mod=is_seen
    )
    return _Plan(blocks, positions[0])


def _pad_with_last(x: Tensor) -> Tensor:
    """Pad ``x`` [b, s] with copies of the last column, so that s is a multiple of ``BLOCK``."""
    padding = -x.shape[1] % BLOCK
    return torch.cat((x, x[:, -1:].expand(-1, padding)), dim=1) if padding else x


def _visible_blocks(low: Tensor, high: Tensor, num_blocks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the partial and full key blocks for each query block, as arguments for ``from_kv_blocks``.

    In a full block every query sees every key. In a partial block only some queries see some of the keys.

    Shapes:
        low, high int32 [b, s], first key that each query sees, and one more than the last key
        output    (counts, indices) for partial blocks and (counts, indices) for full blocks, int32: counts [b, 1, s /
            BLOCK], indices [b, 1, s / BLOCK, num_blocks], of which the first ``counts`` are used
    """
    lows, highs = (x.unflatten(1, (-1, BLOCK)) for x in (low, high))  # 2 x [b, s / BLOCK, BLOCK]
    first_seen, end_seen = lows.amin(2) // BLOCK, -(-highs.amax(2) // BLOCK)
    first_full = -(-lows.amax(2) // BLOCK)
    num_full = (highs.amin(2) // BLOCK - first_full).clamp(min=0)
    num_partial = end_seen - first_seen - num_full
    first_seen, first_full, skipped = (x.unsqueeze(2) for x in (first_seen, first_full, num_full))
    columns = torch.arange(num_blocks, dtype=torch.int32, device=low.device)
    full_idx = first_full + columns
    partial_idx = first_seen + columns
    partial_idx = torch.where(partial_idx < first_full, partial_idx, partial_idx + skipped)
    last = num_blocks - 1  # unused indices must be valid, too
    blocks = (num_partial, partial_idx.clamp(max=last), num_full, full_idx.clamp(max=last))
    partial_count, partial, full_count, full = (x.unsqueeze(1).contiguous() for x in blocks)
    return partial_count, partial, full_count, full

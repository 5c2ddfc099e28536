"""Reference implementations of attention within documents, and inputs with documents of any lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask

from megatron.ops.attention import document_mask, segment_mask

SLOPES = [0.5, 0.25, 0.1, 0.7]
NUM_HEADS, NUM_GROUPS, HEAD_DIM = 4, 2, 8


def draw_document_lengths(length: int, max_length: int) -> st.SearchStrategy[list[int]]:
    """Return a Hypothesis strategy for lists of document lengths, some longer than a sample of ``length`` tokens."""
    return st.lists(st.one_of(st.just(1), st.integers(1, max_length), st.just(length + 3)), min_size=1, max_size=12)


def segment_ids_from_lengths(lengths: Sequence[int], length: int) -> torch.Tensor:
    """Return the document id of each token of a sample [length].

    The documents have ``lengths``, repeated as often as needed; the last one is truncated.
    """
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    num_repeats = -(-length // len(ids))
    return torch.cat([ids + i * len(lengths) for i in range(num_repeats)])[:length]


def make_attention_inputs(batch_size: int, length: int, seed: int = 0) -> list[torch.Tensor]:
    """Return random query, key, value [b, heads, s, d] and a factor of the context for a loss, in fp64.

    Two query heads share each head of keys and values.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = (NUM_HEADS, NUM_GROUPS, NUM_GROUPS, NUM_HEADS)
    tensors = [torch.randn(batch_size, n, length, HEAD_DIM, dtype=torch.float64, generator=generator) for n in shapes]
    return [*[x.requires_grad_() for x in tensors[:3]], tensors[3]]


def reference_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ids: torch.Tensor, *, window: int = 0,
    cap: float = 0.0, slopes: Sequence[float] | None = None, scale: float | None = None, is_causal: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Return the context [b, heads, s, d], computed by the formula of attention with a mask [b, 1, s, s]."""
    positions = torch.arange(ids.shape[1])
    distance = positions.unsqueeze(1) - positions
    mask = document_mask(ids) if is_causal else segment_mask(ids, ids)
    mask = mask & (distance <= window) if window else mask
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    if slopes is not None:
        scores = scores - torch.tensor(slopes, dtype=scores.dtype).view(-1, 1, 1) * distance
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value


def reference_varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_query: torch.Tensor, cu_key: torch.Tensor,
    max_query: int, max_key: int, *, scale: float, window: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Reference for ``varlen_attention`` that computes one sequence at a time and checks the kernel's assumptions."""
    query_starts, key_starts = cu_query.tolist(), cu_key.tolist()
    assert cu_query.dtype == cu_key.dtype == torch.int32
    assert query_starts == sorted(query_starts) and key_starts == sorted(key_starts)
    assert (query_starts[0], query_starts[-1]) == (0, len(query)) and (key_starts[0], key_starts[-1]) == (0, len(key))
    outputs = []
    for i in range(len(query_starts) - 1):
        query_range, key_range = (slice(*boundaries[i : i + 2]) for boundaries in (query_starts, key_starts))
        num_queries, num_keys = query_range.stop - query_range.start, key_range.stop - key_range.start
        assert num_queries <= max_query and num_keys <= max_key and (num_keys >= num_queries)
        distance = torch.arange(num_queries).unsqueeze(1) + num_keys - num_queries - torch.arange(num_keys)
        mask = (distance >= 0) & (distance <= (window or num_keys))
        k, v = (x[key_range].repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[query_range], k) * scale
        probs = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", probs, v))
    return torch.cat(outputs)


def output_and_grads(context: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the context and the gradients of query, key and value."""
    *leaves, factor = inputs
    return [context, *torch.autograd.grad((context * factor).sum(), leaves)]


def max_difference(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference between two lists of tensors; NaN if one contains NaN."""
    return float(
        torch.stack([(a - b).detach().double().abs().max() for a, b in zip(actual, expected, strict=True)]).max()
    )


def reference_flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, score_mod: Callable[..., torch.Tensor] | None,
    block_mask: BlockMask, scale: float | None, enable_gqa: bool,
) -> torch.Tensor:  # fmt: skip
    """Reference for ``flex_attention`` with the mask of ``block_mask``; supports gradients on a CPU."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert block_mask.shape[2:] == (query.shape[2], key.shape[2]), "torch refuses others"
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    batch, head, query_idx, key_idx = (
        torch.arange(n).view([-1 if dim == axis else 1 for dim in range(4)]) for axis, n in enumerate(scores.shape)
    )
    if score_mod is not None:
        scores = score_mod(scores, batch, head, query_idx, key_idx)
    return scores.masked_fill(~expand_block_mask(block_mask), float("-inf")).softmax(-1) @ value


def expand_block_mask(block_mask: BlockMask, *, by_keys: bool = False) -> torch.Tensor:
    """Return the mask of ``block_mask``, bool [b, 1, s, s_k], from the lists of blocks that kernels read.

    Args:
        by_keys: use the lists of query blocks for each key block, as in the backward pass.
    """
    b, _, s, s_k = block_mask.shape
    prefix, block_masks = "q" if by_keys else "kv", []
    for list_name in (prefix, f"full_{prefix}"):
        count, indices = getattr(block_mask, f"{list_name}_num_blocks"), getattr(block_mask, f"{list_name}_indices")
        assert count.dtype == indices.dtype == torch.int32
        rows, columns = indices.shape[2:]
        is_listed = torch.zeros(b, 1, rows, columns, dtype=torch.int32)
        counts = torch.arange(columns) < count.unsqueeze(3)
        is_listed.scatter_add_(3, indices.long(), counts.int())
        assert int(is_listed.max()) <= 1, "a block comes twice"
        block_masks.append((is_listed.transpose(2, 3) if by_keys else is_listed).bool())
    assert not (block_masks[0] & block_masks[1]).any(), "a block comes twice"
    partial, full = (
        x.repeat_interleave(block_mask.BLOCK_SIZE[0], 2).repeat_interleave(block_mask.BLOCK_SIZE[1], 3)
        for x in block_masks
    )
    coordinates = (torch.arange(b).view(-1, 1, 1, 1), 0, torch.arange(s).view(-1, 1), torch.arange(s_k))
    return (partial & block_mask.mask_mod(*coordinates)) | full

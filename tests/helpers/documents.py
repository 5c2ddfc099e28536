"""Attention within documents by the formula, with its mask, and samples of documents of any lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask

from megatron.ops.attention import document_mask, segment_mask

SLOPES = [0.5, 0.25, 0.1, 0.7]
HEADS, GROUPS, SIZE = 4, 2, 8


def lengths_of(length: int, longest: int) -> st.SearchStrategy[list[int]]:
    """Return strategies for the lengths of documents, which may go on beyond a sample of ``length``."""
    return st.lists(st.one_of(st.just(1), st.integers(1, longest), st.just(length + 3)), min_size=1, max_size=12)


def segments_of(lengths: Sequence[int], length: int) -> torch.Tensor:
    """Return the ids [length] of documents of ``lengths``, over and over, the last one cut off."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    times = -(-length // len(ids))
    return torch.cat([ids + number * len(lengths) for number in range(times)])[:length]


def inputs_of(rows: int, length: int, seed: int = 0) -> list[torch.Tensor]:
    """Return query, key, value and a factor of each number of the context, in fp64; keys are for two queries each."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (HEADS, GROUPS, GROUPS, HEADS)
    made = [torch.randn(rows, n, length, SIZE, dtype=torch.float64, generator=generator) for n in shapes]
    return [*[x.requires_grad_() for x in made[:3]], made[3]]


def by_formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ids: torch.Tensor, *, window: int = 0,
    cap: float = 0.0, slopes: Sequence[float] | None = None, scale: float | None = None, is_causal: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Return the context, with a mask of [b, 1, s, s]."""
    places = torch.arange(ids.shape[1])
    behind = places.unsqueeze(1) - places
    mask = document_mask(ids) if is_causal else segment_mask(ids, ids)
    mask = mask & (behind <= window) if window else mask
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    if slopes is not None:
        scores = scores - torch.tensor(slopes, dtype=scores.dtype).view(-1, 1, 1) * behind
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value


def by_sequence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_query: torch.Tensor, cu_key: torch.Tensor,
    max_query: int, max_key: int, *, scale: float, window: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Return what ``varlen_attention`` does, one sequence after another; it looks at what a kernel relies on, too."""
    starts, starts_of_keys = cu_query.tolist(), cu_key.tolist()
    assert cu_query.dtype == cu_key.dtype == torch.int32
    assert starts == sorted(starts) and starts_of_keys == sorted(starts_of_keys)
    assert (starts[0], starts[-1]) == (0, len(query)) and (starts_of_keys[0], starts_of_keys[-1]) == (0, len(key))
    parts = []
    for number in range(len(starts) - 1):
        own, seen = (slice(*each[number : number + 2]) for each in (starts, starts_of_keys))
        count, keys = own.stop - own.start, seen.stop - seen.start
        assert count <= max_query and keys <= max_key and (keys >= count)
        behind = torch.arange(count).unsqueeze(1) + keys - count - torch.arange(keys)
        mask = (behind >= 0) & (behind <= (window or keys))
        k, v = (x[seen].repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[own], k) * scale
        shares = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", shares, v))
    return torch.cat(parts)


def gradients(context: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the context and the gradients of query, key and value."""
    *leaves, factor = inputs
    return [context, *torch.autograd.grad((context * factor).sum(), leaves)]


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Return how far apart two lists are at most; NaN where one is."""
    return float(torch.stack([(a - b).detach().double().abs().max() for a, b in zip(found, wanted, strict=True)]).max())


def by_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, score_mod: Callable[..., torch.Tensor] | None,
    block_mask: BlockMask, scale: float | None, enable_gqa: bool,
) -> torch.Tensor:  # fmt: skip
    """Return what ``flex_attention`` does with nothing but the blocks of ``block_mask``; it has gradients on a CPU."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert block_mask.shape[2:] == (query.shape[2], key.shape[2]), "torch refuses others"
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    batch, head, own, seen = (
        torch.arange(n).view([-1 if dim == place else 1 for dim in range(4)]) for place, n in enumerate(scores.shape)
    )
    if score_mod is not None:
        scores = score_mod(scores, batch, head, own, seen)
    return scores.masked_fill(~mask_of(block_mask), float("-inf")).softmax(-1) @ value


def mask_of(block_mask: BlockMask, *, by_keys: bool = False) -> torch.Tensor:
    """Return what the blocks of ``block_mask`` let through, bool [b, 1, s, s_k], by its lists as kernels read them.

    Args:
        by_keys: by the lists of blocks of queries for each block of keys, as in backward.
    """
    b, _, s, s_k = block_mask.shape
    of, found = "q" if by_keys else "kv", []
    for kind in (of, f"full_{of}"):
        count, which = getattr(block_mask, f"{kind}_num_blocks"), getattr(block_mask, f"{kind}_indices")
        assert count.dtype == which.dtype == torch.int32
        rows, columns = which.shape[2:]
        taken = torch.zeros(b, 1, rows, columns, dtype=torch.int32)
        counts = torch.arange(columns) < count.unsqueeze(3)
        taken.scatter_add_(3, which.long(), counts.int())
        assert int(taken.max()) <= 1, "a block comes twice"
        found.append((taken.transpose(2, 3) if by_keys else taken).bool())
    assert not (found[0] & found[1]).any(), "a block comes twice"
    some_seen, all_seen = (
        x.repeat_interleave(block_mask.BLOCK_SIZE[0], 2).repeat_interleave(block_mask.BLOCK_SIZE[1], 3) for x in found
    )
    places = (torch.arange(b).view(-1, 1, 1, 1), 0, torch.arange(s).view(-1, 1), torch.arange(s_k))
    return (some_seen & block_mask.mask_mod(*places)) | all_seen

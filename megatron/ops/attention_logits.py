"""Maximum attention logits per head, for attention kernels that do not return them.

| function | result | cost |
|---|---|---|
| ``max_logits`` | maximum of ``q k^T * scale`` over the visible pairs | the product q k^T, in tiles of queries |
| ``logit_bounds`` | the larger ``max |q| |k| * scale`` over causal pairs | the norms of q and k |
| ``raise_maxima`` | updates running maxima by either of them | as above; a custom operator in compiled graphs |

Both ignore soft caps, biases such as ALiBi, and sinks, because scaling q and k does not scale them. A head without a
visible pair has the maximum -inf. Nothing is saved for backward, and the host does not wait for a device. Results of
16-bit inputs are in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.ops.attention import mask_value
from tds.backward_state import is_running

TILE_CPU, TILE_DEVICE = 64, 256
"""Number of queries whose scores are computed at a time."""
ALIGNMENT = 64
"""Keys that are multiplied start at a multiple of this, as fast kernels require."""
MAX_SCORES_CPU, MAX_SCORES_DEVICE = 2**19, 2**25
"""Number of scores computed at a time; on a CPU small enough to stay in its caches."""


def raise_maxima(
    maxima: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    starts: torch.Tensor | None,
    positions: torch.Tensor | None,
    first: int,
    window: int,
    scale: float,
    first_head: int,
) -> None:
    """Update the running ``maxima`` by the maximum logits of the queries' heads, in place; no-op in a backward pass.

    Shapes:
        maxima [n], of which the heads ``first_head`` ... ``first_head + a`` are those of ``query`` [b, a, s, d]

    Args:
        key, mask, starts, first, window, scale: as in ``max_logits``.
        positions: positions of the queries [s], to measure ``logit_bounds``; None: measure ``max_logits``.
    """
    function = _raise_in_graph if torch.compiler.is_compiling() else _raise
    function(maxima, query.detach(), key.detach(), mask, starts, positions, first, window, scale, first_head)


def _raise(
    maxima: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    starts: torch.Tensor | None,
    positions: torch.Tensor | None,
    first: int,
    window: int,
    scale: float,
    first_head: int,
) -> None:
    if is_running():  # recomputation measures the same logits again
        return
    if positions is not None:
        logits = logit_bounds(query, key, positions, scale=scale)
    else:
        logits = max_logits(query, key, scale=scale, mask=mask, starts=starts, first=first, window=window)
    heads = maxima[first_head : first_head + len(logits)]
    heads.copy_(torch.maximum(heads, logits.to(heads.dtype)))


_raise_in_graph = torch.library.custom_op("megatron_tds::raise_maxima", _raise, mutates_args=("maxima",))


@torch.no_grad()
def max_logits(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    first: int = 0,
    window: int = 0,
) -> torch.Tensor:
    """Return the maximum of ``q k^T * scale`` over the pairs that attention computes, for each head.

    Without a ``mask``, query i is at position first + i and sees keys up to its own position.

    Shapes:
        query  [b, a, s, d]
        key    [b, g, s_k, d], each head shared by a/g neighbouring query heads
        mask   bool [b or 1, 1, s, s_k], True where a query may attend, or values that are added to the scores,
               [b or 1, a or 1, s, s_k], with ``mask_value`` where it may not
        starts int32 [b, s], the first key that each query sees
        output [a]

    Args:
        scale: factor above 0.
        first: position of the first query among the keys.
        window: number of preceding keys that a query sees; 0: all.
    """
    (_, num_heads, num_queries, _), num_groups = query.shape, key.shape[1]
    wide_dtype = torch.promote_types(query.dtype, torch.float32)
    maxima = query.new_full((num_heads,), -torch.inf, dtype=wide_dtype)
    by_group = query.unflatten(1, (num_groups, -1))  # [b, g, a/g, s, d]
    for sample, groups in _group_slices(query, key):
        keys, queries = _widen(key[sample, groups]), _widen(by_group[sample, groups])
        heads = slice(groups.start * by_group.shape[2], groups.stop * by_group.shape[2])
        for tile in _tiles(num_queries, query.device):
            visible = _key_range(tile, key.shape[2], None if starts is None else starts[sample], mask, first, window)
            rows = queries[:, :, tile].flatten(1, 2)  # [groups, a/g n, d]
            scores = _product(rows, keys[:, visible].transpose(1, 2))
            scores = scores.view(heads.stop - heads.start, -1, visible.stop - visible.start)  # [heads, n, keys]
            if mask is not None:
                scores.masked_fill_(_is_hidden(mask, sample, heads, tile), -torch.inf)
            else:
                first_keys = None if starts is None else starts[sample, tile]
                _hide_outside(scores, first + tile.start - visible.start, visible.start, first_keys, window)
            torch.maximum(maxima[heads], scores.amax(dim=(1, 2)), out=maxima[heads])
    return maxima.mul_(scale)


@torch.no_grad()
def logit_bounds(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Return the maximum of ``|q| |k| * scale`` over the pairs of a query and a key at the same or an earlier position.

    It is at least ``max_logits``. Documents and windows are ignored, so no mask is needed.

    Shapes:
        query  [b, a, s, d]
        key    [b, g, s_k, d], the keys from position 0 on
        positions [s], of the queries
        output [a]
    """
    wide_dtype = torch.promote_types(query.dtype, torch.float32)
    query_norms, key_norms = (torch.linalg.vector_norm(x, dim=-1, dtype=wide_dtype) for x in (query, key))
    largest_keys = key_norms.cummax(dim=-1).values[..., positions]  # [b, g, s]
    bounds = query_norms.unflatten(1, (key.shape[1], -1)) * largest_keys.unsqueeze(2)  # [b, g, a/g, s]
    return bounds.flatten(1, 2).amax(dim=(0, 2)).mul_(scale)


def _group_slices(query: torch.Tensor, key: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Yield (sample, key groups) pairs that cover all heads of all samples."""
    (b, a, _, _), (_, g, s_k, _) = query.shape, key.shape
    is_on_host = query.device.type == "cpu"
    tile, limit = (TILE_CPU, MAX_SCORES_CPU) if is_on_host else (TILE_DEVICE, MAX_SCORES_DEVICE)
    size = max(1, limit // (a // g * tile * s_k))
    for sample in range(b):
        for start in range(0, g, size):
            yield sample, slice(start, min(start + size, g))


def _tiles(num_queries: int, device: torch.device) -> Iterator[slice]:
    size = TILE_CPU if device.type == "cpu" else TILE_DEVICE
    for start in range(0, num_queries, size):
        yield slice(start, min(start + size, num_queries))


def _key_range(
    tile: slice, num_keys: int, starts: torch.Tensor | None, mask: torch.Tensor | None, first: int, window: int
) -> slice:
    """Return a range that includes all keys that the queries of ``tile`` see; ``starts`` [s] belong to one sample."""
    if mask is not None:
        return slice(0, num_keys)
    start = max(0, first + tile.start - window) if window else 0
    if starts is not None and starts.device.type == "cpu":  # on other devices, the host would have to wait
        start = max(start, int(starts[tile].min()))
    return slice(start // ALIGNMENT * ALIGNMENT, first + tile.stop)


def _widen(x: torch.Tensor) -> torch.Tensor:
    """Convert 16-bit values on a CPU to fp32, in which products are faster and exact."""
    return x.float() if x.device.type == "cpu" and x.dtype != torch.float64 else x


def _product(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Multiply [groups, n, d] by [groups, d, keys]; 16-bit values are accumulated and returned in fp32."""
    if queries.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(queries, keys, out_dtype=torch.float32)
    return torch.bmm(queries, keys)


def _is_hidden(mask: torch.Tensor, sample: int, heads: slice, tile: slice) -> torch.Tensor:
    """Return True where ``mask`` hides a key from a query of ``tile``, bool [heads or 1, n, s_k]."""
    of_sample = mask[sample if len(mask) > 1 else 0]  # [a or 1, s, s_k]
    of_heads = of_sample[heads] if len(of_sample) > 1 else of_sample
    rows = of_heads[:, tile]
    return ~rows if rows.dtype == torch.bool else rows <= mask_value(rows.dtype)


def _hide_outside(
    scores: torch.Tensor, position: int, first_key: int, starts: torch.Tensor | None, window: int
) -> None:
    """Set the scores of later keys, of keys before ``starts`` and of keys before the window to -inf, in place.

    Shapes:
        scores [heads, n, keys], the first query at index ``position`` of the keys
        starts [n], counted from the first key of the sequence

    Args:
        first_key: position of the first of the keys in the sequence.
    """
    _, num_queries, num_keys = scores.shape
    if starts is None and not window:  # only the last n keys are later than some query
        future = torch.ones(num_queries, num_queries, dtype=torch.bool, device=scores.device).triu_(1)
        scores[..., num_keys - num_queries :].masked_fill_(future, -torch.inf)
        return
    keys = torch.arange(num_keys, device=scores.device)
    queries = torch.arange(position, position + num_queries, device=scores.device).unsqueeze(1)  # [n, 1]
    hidden = keys > queries
    if window:
        hidden |= keys < queries - window
    if starts is not None:
        hidden |= keys + first_key < starts.unsqueeze(1)
    scores.masked_fill_(hidden, -torch.inf)

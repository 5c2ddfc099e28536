"""Attention within documents, given their starts, without an s x s mask.

| device | long documents | short documents |
|---|---|---|
| CPU | tiles of queries, with the keys that any of them sees | as for long documents |
| CUDA, 16 bits, plain | ``torch.nn.attention.varlen`` with ``cu_seqlens`` | windows of 2 ``SHORT`` keys with a mask |
| CUDA in other cases, with Triton | ``flex_attention`` (``megatron.ops.flex_attention``) | as for long documents |

Computation and memory grow with s times the length of a document. The host reads no lengths from a device: all shapes
follow from the shape of the sample.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.utils.flop_counter import register_flop_formula

from megatron.ops.attention import attention, mask_value
from megatron.ops.flex_attention import flex_document_attention, supports_flex
from megatron.ops.padded_heads import pad_heads
from megatron.ops.plans import get_plan
from megatron.torch_compat import has_triton, varlen_attention

# Starts of documents: int32 [b, s], the first key that each query sees. The tensor has the shape of the tokens, so that
# it is split and communicated like them. If queries are a slice of a sequence, as with context parallelism, ``starts``
# is the same slice, and the keys are those of the full sequence. Positions count from the first key.


def document_starts(segment_ids: Tensor) -> Tensor:
    """Return the document start for each position.

    Shapes:
        segment_ids [b, s] integers, equal and adjacent within a document
        output      int32 [b, s]
    """
    positions = torch.arange(segment_ids.shape[1], dtype=torch.int32, device=segment_ids.device).expand_as(segment_ids)
    is_same = segment_ids[:, 1:] == segment_ids[:, :-1]
    starts = torch.cat((positions[:, :1], positions[:, 1:].masked_fill(is_same, 0)), dim=1)
    return starts.cummax(dim=1).values


def document_stops(starts: Tensor) -> Tensor:
    """Return the document end (exclusive) for each position, int32 [b, s]; ``starts`` must cover full samples."""
    length = starts.shape[1]
    is_same = starts[:, 1:] == starts[:, :-1]
    ends = starts[:, 1:].masked_fill(is_same, length)  # i + 1 if that starts a document
    ends = torch.cat((ends, torch.full_like(starts[:, :1], length)), dim=1)
    return ends.flip(1).cummin(dim=1).values.flip(1)


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, stops: Tensor | None = None, *, first: int = 0,
    window: int = 0, scale: float | None = None, cap: float = 0.0, slopes: list[float] | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``softmax(q k^T * scale) v``; query i, at position first + i, sees the keys starts[i] to first + i.

    Shapes:
        query  [b, a/t, s, d]
        key, value [b, g/t, s_k, d], each head shared by a/g neighbouring query heads; values may have another size d_v
        starts int32 [b, s], at most the query's position and at least the previous query's start
        stops  int32 [b, s], one more than the last key that each query sees; None: attention is causal
        sinks  [a/t], see ``sink_attention``; None: no sinks
        output [b, a/t, s, d_v]

    Args:
        first: position of the first query among the keys, if queries are a slice of a sequence.
        window: number of preceding keys that a query sees; 0: all of its document.
        scale: default ``d ** -0.5``.
        cap: cap of ``softcapped_attention``; 0: none.
        slopes: ALiBi slopes, one for each head; None: no ALiBi.

    Source: Dao et al. 2022, "FlashAttention"; Press et al. 2022, "Train short, test long".
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if query.device.type == "cpu":
        context: Tensor = _forward(query, key, value, starts, stops, slopes, first, window, scale, cap, sinks)
        return context
    if value.shape[-1] != query.shape[-1]:
        options: dict[str, Any] = {
            "first": first, "window": window, "scale": scale, "cap": cap, "slopes": slopes, "sinks": sinks,
        }  # fmt: skip
        padded: Tensor = pad_heads(partial(document_attention, **options))(query, key, value, starts, stops)
        return padded
    is_plain = stops is None and not cap and slopes is None and sinks is None
    if select_implementation(query, key.shape[2], query.shape[-1], is_plain=is_plain) == FLEX:
        return flex_document_attention(
            query, key, value, starts, stops, first=first, window=window, scale=scale, cap=cap, slopes=slopes,
            sinks=sinks,
        )  # fmt: skip
    assert is_plain
    return varlen_document_attention(query, key, value, starts, first=first, window=window, scale=scale)


TILES, VARLEN, FLEX = "tiles", "FlashAttention", "flex_attention"
"""Implementations of attention within documents: the first on a CPU, the others on ``DEVICE_TYPE``."""
DEVICE_TYPE = "cuda"


def select_implementation(x: Tensor, length: int, head_size: int, *, is_plain: bool = True) -> str | None:
    """Choose a ``document_attention`` implementation by the device and dtype of ``x``; None: a mask is needed.

    Args:
        length: sample length.
        is_plain: attention is causal, scores have neither a cap nor a bias, and there are no sinks.
    """
    if x.device.type == "cpu":
        return TILES
    if x.device.type != DEVICE_TYPE:
        return None
    is_long = length > 2 * SHORT and head_size % 8 == 0
    if is_plain and is_long and _has_flash(x.dtype, x.device, head_size):
        return VARLEN
    return FLEX if supports_flex(x.dtype, head_size) and has_triton() else None


@torch.compiler.assume_constant_result
def _has_flash(dtype: torch.dtype, device: torch.device, head_size: int) -> bool:
    return _can_use_flash(dtype, device, head_size)


@functools.cache
def _can_use_flash(dtype: torch.dtype, device: torch.device, head_size: int) -> bool:
    query, key, value = (torch.empty(1, 1, SHORT, head_size, dtype=dtype, device=device) for _ in range(3))
    return bool(can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, False)))


# On a CPU: tiles of neighbouring queries, each with the keys from the first to the last one that any of them sees.
#
# The scores of a tile become probabilities in place and are recomputed in backward; nothing of size [s, s_k] is saved.
# Keys outside of all documents of a tile are skipped. It is a custom operator (``torch.library``), a single node for
# ``--compile``.

TILE = 64
"""Number of queries of a tile."""
CACHED_SCORES = 2**19
"""Number of scores computed at a time, small enough to stay in the caches between operations."""


class _Tile(NamedTuple):
    """Queries and the keys that any query sees. All queries see keys ``left`` to ``right``."""

    queries: slice
    keys: slice
    left: int
    right: int


class _HeadSlice(NamedTuple):
    """Key groups in sample ``row`` that are processed together, with query heads and the sample's tiles."""

    row: int
    groups: slice
    heads: slice
    tiles: list[_Tile]


class _TileScores:
    """Computes the scores of tiles, with the settings that all tiles share."""

    def __init__(
        self, query: Tensor, key: Tensor, starts: Tensor, stops: Tensor | None, slopes: list[float] | None, first: int,
        window: int, scale: float, cap: float, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.num_groups = query.shape, key.shape[1]
        self.first, self.scale, self.cap = first, scale, cap
        self.wide_dtype = torch.promote_types(query.dtype, torch.float32)
        self.slopes = None if slopes is None else torch.tensor(slopes, dtype=self.wide_dtype).view(-1, 1, 1)
        self.sinks = None if sinks is None else sinks.to(self.wide_dtype).view(-1, 1, 1)
        positions = torch.arange(first, first + query.shape[2], dtype=torch.int32).expand_as(starts)
        self.starts = torch.maximum(starts, positions - window) if window else starts
        self.stops = positions + 1 if stops is None else stops

    def copy_heads(self, x: Tensor, row: int, heads: slice) -> Tensor:
        """Copy ``heads`` of sample ``row`` from ``x`` [b, n, s, d], contiguous.

        16-bit values are converted to fp32, in which products on a CPU are faster.
        """
        return x[row, heads].to(self.wide_dtype).contiguous()

    def head_slices(self) -> Iterator[_HeadSlice]:
        """Yield slices that cover all heads of all samples."""
        b, a, _, _ = self.shape
        heads_per_group = a // self.num_groups
        for row in range(b):
            tiles = self._tiles(row)
            longest = max((tile.keys.stop - tile.keys.start for tile in tiles), default=1)
            max_groups = max(1, CACHED_SCORES * torch.get_num_threads() // (heads_per_group * TILE * longest))
            for start in range(0, self.num_groups, max_groups):
                stop = min(start + max_groups, self.num_groups)
                yield _HeadSlice(row, slice(start, stop), slice(start * heads_per_group, stop * heads_per_group), tiles)

    def _tiles(self, row: int) -> list[_Tile]:
        lows, highs = self.starts[row].split(TILE), self.stops[row].split(TILE)
        tiles = []
        for idx, (low, high) in enumerate(zip(lows, highs, strict=True)):
            start, left, right, stop = (int(bound) for bound in (*low.aminmax(), *high.aminmax()))
            first = idx * TILE
            queries = slice(first, min(first + TILE, self.shape[2]))
            tiles.append(_Tile(queries, slice(start, stop), min(left, stop), max(right, start)))
        return tiles

    def probabilities(
        self, query: Tensor, key: Tensor, head_slice: _HeadSlice, tile: _Tile
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return a tile's probabilities, tanh of the scores if they are capped, and the sinks' probabilities.

        Shapes:
            query  [groups, n/groups q, d], key [groups, k, d]
            output 2 x [groups, n/groups q, k], sink probabilities [n, q, 1]
        """
        scores = torch.bmm(query, key.transpose(1, 2))
        tangents = None
        if self.cap:
            tangents = scores.mul_(self.scale / self.cap).tanh_()
            scores = tangents * self.cap
        else:
            scores.mul_(self.scale)
        by_head = scores.view(-1, tile.queries.stop - tile.queries.start, key.shape[1])  # [n, q, k]
        low, high = (
            bounds[head_slice.row, tile.queries].unsqueeze(1) for bounds in (self.starts, self.stops)
        )  # [q, 1]
        if self.slopes is not None:
            offsets = torch.arange(tile.keys.start, tile.keys.stop) - self._positions(tile).unsqueeze(1)  # [q, k]
            by_head.add_(self.slopes[head_slice.heads] * offsets)
        if tile.left > tile.keys.start:
            keys = torch.arange(tile.keys.start, tile.left)
            by_head[..., : len(keys)].masked_fill_(keys < low, mask_value(self.wide_dtype))
        if tile.right < tile.keys.stop:
            keys = torch.arange(tile.right, tile.keys.stop)
            by_head[..., -len(keys) :].masked_fill_(keys >= high, mask_value(self.wide_dtype))
        if self.sinks is None:
            return torch.softmax(scores, dim=-1, out=scores), tangents, None
        sinks = self.sinks[head_slice.heads]
        log_denominators = torch.logaddexp(by_head.logsumexp(-1, keepdim=True), sinks)  # [n, q, 1]
        by_head.sub_(log_denominators).exp_()
        return scores, tangents, (sinks - log_denominators).exp()

    def _positions(self, tile: _Tile) -> Tensor:
        return torch.arange(self.first + tile.queries.start, self.first + tile.queries.stop)


def _by_group(x: Tensor, num_groups: int) -> Tensor:
    """Concatenate queries of heads [n, q, d] by group: [groups, n/groups q, d]."""
    return x.reshape(num_groups, -1, x.shape[-1])


def _context_like(query: Tensor, value: Tensor) -> Tensor:
    """Allocate the context in the memory layout that the layer needs: [b, a, s, d_v] as a view of [s, b, a, d_v]."""
    b, a, s, _ = query.shape
    return query.new_empty(s, b, a, value.shape[-1]).permute(1, 2, 0, 3)


@torch.library.custom_op("megatron_tds::document_attention", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, stops: Tensor | None, slopes: list[float] | None,
    first: int, window: int, scale: float, cap: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    context = _context_like(query, value)
    scores = _TileScores(query, key, starts, stops, slopes, first, window, scale, cap, sinks)
    for head_slice in scores.head_slices():
        heads = scores.copy_heads(query, head_slice.row, head_slice.heads)  # [n, s, d]
        k, v = (scores.copy_heads(x, head_slice.row, head_slice.groups) for x in (key, value))  # 2 x [groups, s_k, d]
        context_of_heads = context[head_slice.row, head_slice.heads]
        for tile in head_slice.tiles:
            q = _by_group(heads[:, tile.queries], len(k))
            probabilities, _, _ = scores.probabilities(q, k[:, tile.keys], head_slice, tile)
            context_of_heads[:, tile.queries] = torch.bmm(probabilities, v[:, tile.keys]).view(
                len(heads), -1, v.shape[-1]
            )
    return context


@torch.library.custom_op("megatron_tds::document_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, stops: Tensor | None,
    slopes: list[float] | None, first: int, window: int, scale: float, cap: float, sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients for query, key, value and sinks; the last is empty if there are no sinks."""
    scores = _TileScores(query, key, starts, stops, slopes, first, window, scale, cap, sinks)
    sinks_grad = query.new_zeros(0 if sinks is None else len(sinks), dtype=scores.wide_dtype)
    grads = [x.new_zeros(x.shape, dtype=scores.wide_dtype) for x in (query, key, value)]
    for head_slice in scores.head_slices():
        heads, grad_heads = (
            scores.copy_heads(x, head_slice.row, head_slice.heads) for x in (query, gradient)
        )  # 2 x [n, s, d]
        k, v = (scores.copy_heads(x, head_slice.row, head_slice.groups) for x in (key, value))  # 2 x [groups, s_k, d]
        query_grad, (key_grad, value_grad) = (
            grads[0][head_slice.row, head_slice.heads],
            (x[head_slice.row, head_slice.groups] for x in grads[1:]),
        )
        for tile in head_slice.tiles:
            q, grad = (_by_group(x[:, tile.queries], len(k)) for x in (heads, grad_heads))
            probabilities, tangents, sink_probabilities = scores.probabilities(q, k[:, tile.keys], head_slice, tile)
            value_grad[:, tile.keys] += torch.bmm(probabilities.transpose(1, 2), grad)
            score_grads = torch.bmm(grad, v[:, tile.keys].transpose(1, 2))  # gradient of the probabilities
            if sink_probabilities is not None:
                # softmax backward of a score whose probability has the gradient 0, because the sink has no value
                means = torch.linalg.vecdot(probabilities, score_grads).view(len(heads), -1)  # [n, q]
                sinks_grad[head_slice.heads] -= torch.linalg.vecdot(sink_probabilities.squeeze(-1), means)
            torch.ops.aten._softmax_backward_data.out(
                score_grads, probabilities, -1, probabilities.dtype, grad_input=score_grads
            )
            if tangents is not None:
                score_grads.mul_(1.0 - tangents.square_())
            product_grads = score_grads.mul_(scale)
            query_grad[:, tile.queries] = torch.bmm(product_grads, k[:, tile.keys]).view(len(heads), -1, q.shape[-1])
            key_grad[:, tile.keys] += torch.bmm(product_grads.transpose(1, 2), q)
    q_out, k_out, v_out = (x.to(query.dtype) for x in grads)
    return q_out, k_out, v_out, sinks_grad if sinks is None else sinks_grad.to(sinks.dtype)


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return _context_like(query, value)


@_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, stops: Tensor | None,
    slopes: list[float] | None, first: int, window: int, scale: float, cap: float, sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q_grad, k_grad, v_grad = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    return q_grad, k_grad, v_grad, query.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *_, sinks = inputs
    ctx.save_for_backward(*inputs[:5], sinks)
    ctx.numbers = inputs[5:-1]


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, sinks = ctx.saved_tensors
    *grads, sinks_grad = _backward(grad, *tensors, *ctx.numbers, sinks)
    return *grads, *[None] * 7, None if sinks is None else sinks_grad


_forward.register_autograd(_gradient, setup_context=_save_for_backward)


def _product_flops(query: torch.Size, key: torch.Size, size: int) -> int:
    """Return the FLOPs to multiply every query with the keys up to its position, over ``size`` elements.

    All keys count as one document.
    """
    b, a, s, _ = query
    return b * a * s * (2 * key[2] - s + 1) * size


@register_flop_formula(torch.ops.megatron_tds.document_attention)
def _flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return _product_flops(query, key, query[3] + value[3])


@register_flop_formula(torch.ops.megatron_tds.document_attention_backward)
def _flops_of_backward(
    _: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *__: Any, **___: Any
) -> int:
    return _product_flops(query, key, 3 * query[3] + 2 * value[3])


# On CUDA: documents of more than ``SHORT`` tokens by ``cu_seqlens``, shorter ones by windows of preceding keys.
#
# FlashAttention launches blocks for as many sequences as cu_seqlens has entries, and its backward allocates memory for
# each sequence. One entry per token would fit any sample but require gigabytes. The length of a sample limits the
# number of long documents in it, so the number of entries follows from the length, and the host does not count
# documents. A run of neighbouring short documents becomes one or more sequences of at most ``MAX_RUN_TOKENS`` tokens,
# whose results are not used.

SHORT = 256
MAX_RUN_TOKENS = 4 * SHORT


class _Plan(NamedTuple):
    """Data that all layers of a stage share for a micro-batch.

    Shapes:
        is_short [b, s], True for queries of short documents
        cu_query, cu_key int32 [n + 1], see ``cumulative_lengths``
        mask [b blocks, 1, SHORT, 2 SHORT], True where a query of a short document may attend
    """

    is_short: Tensor
    cu_query: Tensor
    cu_key: Tensor
    mask: Tensor


def varlen_document_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *, first: int, window: int, scale: float
) -> Tensor:
    """Compute ``document_attention`` for causal attention without cap and bias."""
    b, _, s, _ = query.shape
    plan = get_plan(_plan, starts, None, key.shape[2], first, window)
    by_window = _windowed_attention(query, key, value, plan.mask, first=first, scale=scale)
    q, k, v = (x.permute(0, 2, 1, 3).flatten(0, 1) for x in (query, key, value))  # [b s, a, d], 2 x [b s_k, g, d]
    by_length = varlen_attention(q, k, v, plan.cu_query, plan.cu_key, s, key.shape[2], scale=scale, window=window)
    return torch.where(plan.is_short[:, None, :, None], by_window, by_length.unflatten(0, (b, s)).permute(0, 2, 1, 3))


def _plan(starts: Tensor, _: None, num_keys: int, first: int, window: int) -> _Plan:
    positions = torch.arange(first, first + starts.shape[1], dtype=starts.dtype, device=starts.device)
    stops = document_stops(starts - first) + first
    is_short = stops - starts <= SHORT
    cumulative = cumulative_lengths(starts, is_short, positions, num_keys)
    return _Plan(is_short, *cumulative, _window_mask(starts, first, window))


def cumulative_lengths(starts: Tensor, is_short: Tensor, positions: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Compute ``cu_seqlens`` for queries and for keys: sequence starts, counted over all samples.

    If queries are a slice of a sample, two sequences contain keys but no queries: the first contains keys before the
    first key that any query sees, the last contains keys after the queries. If queries are full samples, these two
    sequences are empty. Unused entries are always empty sequences.

    Shapes:
        starts, is_short [b, s], positions [s]
        output 2 x int32 [n + 1], where n depends only on the shape
    """
    b, s = starts.shape
    is_start = (starts == positions) & ~is_short  # a long document
    is_start[:, 1:] |= is_short[:, 1:] & (~is_short[:, :-1] | (positions[1:] % MAX_RUN_TOKENS == 0))
    is_start[:, 0] = True
    num_entries = 2 * (s // (SHORT + 1)) + s // MAX_RUN_TOKENS + 5
    # entries count from 1; positions without a start write to the last entry
    entry_idx = torch.where(is_start, is_start.cumsum(1), num_entries - 1)
    offsets = torch.arange(s, dtype=torch.int32, device=starts.device).expand(b, s)
    queries = torch.full((b, num_entries), s, dtype=torch.int32, device=starts.device)
    queries.scatter_(1, entry_idx, torch.where(is_start, offsets, s))
    keys = queries + positions[0]
    keys[:, 1] = torch.where(is_short[:, 0], positions[0], starts[:, 0])
    queries[:, 0], keys[:, 0] = 0, 0
    rows = torch.arange(b, dtype=torch.int32, device=starts.device).unsqueeze(1)
    return _with_end(queries + rows * s, b * s), _with_end(keys + rows * num_keys, b * num_keys)


def _with_end(begins: Tensor, total: int) -> Tensor:
    return F.pad(begins.flatten(), (0, 1), value=total)


def _window_mask(starts: Tensor, first: int, window: int) -> Tensor:
    """Build the mask for ``_windowed_attention``: True for visible keys in the query's or the previous block.

    Shapes:
        output bool [b blocks, 1, SHORT, 2 SHORT]
    """
    b, s = starts.shape
    blocks = -(-s // SHORT)
    # positions of queries and of their keys, relative to the first query
    query_offsets = torch.arange(blocks * SHORT, device=starts.device).view(blocks, SHORT, 1)
    key_offsets = (query_offsets[:, :1] - SHORT) + torch.arange(2 * SHORT, device=starts.device)  # [blocks, 1, 2 SHORT]
    first_keys = F.pad(starts - first, (0, blocks * SHORT - s), value=-first).view(b, blocks, SHORT, 1)
    is_seen = (
        (key_offsets >= first_keys) & (key_offsets <= query_offsets) & (key_offsets >= -first)
    )  # [b, blocks, SHORT, 2 SHORT]
    if window:
        is_seen &= key_offsets >= query_offsets - window
    return is_seen.flatten(0, 1).unsqueeze(1)


def _windowed_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, first: int, scale: float) -> Tensor:
    """Attend within documents up to ``SHORT`` tokens; results for longer documents are incomplete.

    Each block of ``SHORT`` queries sees the keys at the same positions and the ``SHORT`` keys before them.
    """
    b, _, s, _ = query.shape
    blocks = -(-s // SHORT)
    end_pad, start_pad = blocks * SHORT - s, max(SHORT - first, 0)
    queries = F.pad(query, (0, 0, 0, end_pad)).unflatten(2, (blocks, SHORT))  # [b, a, blocks, SHORT, d]
    keys_and_values = [
        F.pad(x[:, :, max(first - SHORT, 0) : first + s], (0, 0, start_pad, end_pad)) for x in (key, value)
    ]
    split = [x.unflatten(2, (blocks + 1, SHORT)) for x in keys_and_values]
    pairs = [torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3) for x in split]  # [b, g, blocks, 2 SHORT, d]
    context = attention(*(x.transpose(1, 2).flatten(0, 1) for x in (queries, *pairs)), mask=mask, scale=scale)
    return context.unflatten(0, (b, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :s]

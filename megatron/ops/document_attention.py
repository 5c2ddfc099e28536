"""Attention within documents by where each begins, with no mask of s x s: on a CPU by tiles, on CUDA by FlashAttention.

| where | long documents | short ones |
|---|---|---|
| CPU | tiles of queries, each with the keys that one of them sees | the same |
| CUDA, 16 bits, plain | ``torch.nn.attention.varlen`` by ``cu_seqlens`` | windows of 2 ``SHORT`` keys with a mask |
| CUDA else, with Triton | ``flex_attention`` of ``megatron.ops.flex_attention`` | the same |

What is computed and what is in memory grow with s times the length of a document. The host reads no length from a
device: all shapes are those of the sample.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.utils.flop_counter import register_flop_formula

from megatron.ops.attention import attention, lowest
from megatron.ops.flex_attention import attention_by_blocks, takes_blocks
from megatron.ops.plans import plan_of
from megatron.torch_compat import has_triton, varlen_attention

# Where documents begin: int32 [b, s], of each query the first key that it sees. It has the shape of the tokens, so it
# is cut and sent as they are. Queries that are a piece of a sequence, as on a rank of context parallelism, take the
# same piece of it, with the keys of all; positions count from the first key.


def document_starts(segment_ids: Tensor) -> Tensor:
    """Return where the document of each position begins.

    Shapes:
        segment_ids [b, s] integers, equal and adjacent within a document
        output      int32 [b, s]
    """
    positions = torch.arange(segment_ids.shape[1], dtype=torch.int32, device=segment_ids.device).expand_as(segment_ids)
    goes_on = segment_ids[:, 1:] == segment_ids[:, :-1]
    begins = torch.cat((positions[:, :1], positions[:, 1:].masked_fill(goes_on, 0)), dim=1)
    return begins.cummax(dim=1).values


def document_stops(starts: Tensor) -> Tensor:
    """Return one more than the last position of each position's document, of ``starts`` of whole samples; int32."""
    length = starts.shape[1]
    goes_on = starts[:, 1:] == starts[:, :-1]
    ends = starts[:, 1:].masked_fill(goes_on, length)  # where a position's next one begins a document
    ends = torch.cat((ends, torch.full_like(starts[:, :1], length)), dim=1)
    return ends.flip(1).cummin(dim=1).values.flip(1)


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, stops: Tensor | None = None, *, first: int = 0,
    window: int = 0, scale: float | None = None, cap: float = 0.0, slopes: list[float] | None = None,
) -> Tensor:  # fmt: skip
    """Return ``softmax(q k^T * scale) v``; query i, at position first + i, sees the keys from starts[i] to its own.

    Shapes:
        query  [b, a/t, s, d]
        key, value [b, g/t, s_k, d], each for a/g neighbouring queries
        starts int32 [b, s], none beyond its query's position and none below that of the query before
        stops  int32 [b, s], one more than the last key that a query sees; None: attention is causal
        output [b, a/t, s, d]

    Args:
        first: position of the first query among the keys: of a piece of a sequence.
        window: keys before its own that a query sees; 0: all of its document.
        scale: default ``d ** -0.5``.
        cap: of ``softcapped_attention``; 0: none.
        slopes: of ALiBi, one for each head; None: none.

    Source: Dao et al. 2022, "FlashAttention"; Press et al. 2022, "Train short, test long".
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if query.device.type == "cpu":
        context: Tensor = _forward(query, key, value, starts, stops, slopes, first, window, scale, cap)
        return context
    is_plain = stops is None and not cap and slopes is None
    if way_of(query, key.shape[2], query.shape[-1], is_plain=is_plain) == BLOCKS:
        return attention_by_blocks(
            query, key, value, starts, stops, first=first, window=window, scale=scale, cap=cap, slopes=slopes
        )
    assert is_plain
    return attention_by_length(query, key, value, starts, first=first, window=window, scale=scale)


TILES, LENGTHS, BLOCKS = "tiles", "FlashAttention", "flex_attention"
"""By what documents are kept apart without a mask: the first on a CPU, the others on ``KIND``."""
KIND = "cuda"


def way_of(x: Tensor, length: int, head_size: int, *, is_plain: bool = True) -> str | None:
    """Return by what ``document_attention`` goes on the device of ``x`` and for its type, or None: a mask is needed.

    Args:
        length: of samples.
        is_plain: scores are causal, not capped, and nothing is added to them.
    """
    if x.device.type == "cpu":
        return TILES
    if x.device.type != KIND:
        return None
    is_long = length > 2 * SHORT and head_size % 8 == 0
    if is_plain and is_long and _has_flash(x.dtype, x.device, head_size):
        return LENGTHS
    return BLOCKS if takes_blocks(x.dtype, head_size) and has_triton() else None


@torch.compiler.assume_constant_result
def _has_flash(dtype: torch.dtype, place: torch.device, head_size: int) -> bool:
    return _asked_flash(dtype, place, head_size)


@functools.cache
def _asked_flash(dtype: torch.dtype, place: torch.device, head_size: int) -> bool:
    query, key, value = (torch.empty(1, 1, SHORT, head_size, dtype=dtype, device=place) for _ in range(3))
    return bool(can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, False)))


# On a CPU: tiles of neighbouring queries, each with the keys from the first that one of its queries sees to the last.
#
# Scores of a tile become probabilities in place, and are made once more in backward: nothing of [s, s_k] is kept.
# What lies outside every document of a tile is not computed. It is an operator (``torch.library``), one node to
# ``--compile``.

TILE = 64
"""Queries of a tile."""
CACHED = 2**19
"""Scores that are worked on at a time: few enough to stay in the caches from one step to the next."""


class _Tile(NamedTuple):
    """Queries, and the keys that some of them see; those before ``left`` and from ``right`` on not all of them do."""

    own: slice
    keys: slice
    left: int
    right: int


class _Part(NamedTuple):
    """Some groups of one sample and their heads, with the tiles of the sample."""

    row: int
    groups: slice
    heads: slice
    tiles: list[_Tile]


class _Scores:
    """What all tiles share."""

    def __init__(
        self, query: Tensor, key: Tensor, starts: Tensor, stops: Tensor | None, slopes: list[float] | None, first: int,
        window: int, scale: float, cap: float,
    ) -> None:  # fmt: skip
        self.shape, self.num_groups = query.shape, key.shape[1]
        self.first, self.scale, self.cap = first, scale, cap
        self.wide = torch.promote_types(query.dtype, torch.float32)
        self.slopes = None if slopes is None else torch.tensor(slopes, dtype=self.wide).view(-1, 1, 1)
        own = torch.arange(first, first + query.shape[2], dtype=torch.int32).expand_as(starts)
        self.low = torch.maximum(starts, own - window) if window else starts
        self.high = own + 1 if stops is None else stops

    def taken(self, x: Tensor, row: int, heads: slice) -> Tensor:
        """Return ``heads`` of one sample of ``x`` [b, n, s, d], contiguous; 16 bits in fp32, which is faster."""
        return x[row, heads].to(self.wide).contiguous()

    def parts(self) -> Iterator[_Part]:
        """Yield all heads of all samples."""
        b, a, _, _ = self.shape
        each = a // self.num_groups
        for row in range(b):
            tiles = self._tiles(row)
            longest = max((tile.keys.stop - tile.keys.start for tile in tiles), default=1)
            most = max(1, CACHED * torch.get_num_threads() // (each * TILE * longest))
            for begin in range(0, self.num_groups, most):
                stop = min(begin + most, self.num_groups)
                yield _Part(row, slice(begin, stop), slice(begin * each, stop * each), tiles)

    def _tiles(self, row: int) -> list[_Tile]:
        lows, highs = self.low[row].split(TILE), self.high[row].split(TILE)
        found = []
        for number, (low, high) in enumerate(zip(lows, highs, strict=True)):
            start, left, right, stop = (int(each) for each in (*low.aminmax(), *high.aminmax()))
            begin = number * TILE
            own = slice(begin, min(begin + TILE, self.shape[2]))
            found.append(_Tile(own, slice(start, stop), min(left, stop), max(right, start)))
        return found

    def probabilities(self, query: Tensor, key: Tensor, part: _Part, tile: _Tile) -> tuple[Tensor, Tensor | None]:
        """Return the probabilities of a tile, and with a cap the hyperbolic tangents that its scores are made of.

        Shapes:
            query  [groups, n/groups q, d], key [groups, k, d]
            output [groups, n/groups q, k]
        """
        scores = torch.bmm(query, key.transpose(1, 2))
        tangents = None
        if self.cap:
            tangents = scores.mul_(self.scale / self.cap).tanh_()
            scores = tangents * self.cap
        else:
            scores.mul_(self.scale)
        by_head = scores.view(-1, tile.own.stop - tile.own.start, key.shape[1])  # [n, q, k]
        low, high = (each[part.row, tile.own].unsqueeze(1) for each in (self.low, self.high))  # [q, 1]
        if self.slopes is not None:
            ahead = torch.arange(tile.keys.start, tile.keys.stop) - self._positions(tile).unsqueeze(1)  # [q, k]
            by_head.add_(self.slopes[part.heads] * ahead)
        if tile.left > tile.keys.start:
            keys = torch.arange(tile.keys.start, tile.left)
            by_head[..., : len(keys)].masked_fill_(keys < low, lowest(self.wide))
        if tile.right < tile.keys.stop:
            keys = torch.arange(tile.right, tile.keys.stop)
            by_head[..., -len(keys) :].masked_fill_(keys >= high, lowest(self.wide))
        return torch.softmax(scores, dim=-1, out=scores), tangents

    def _positions(self, tile: _Tile) -> Tensor:
        return torch.arange(self.first + tile.own.start, self.first + tile.own.stop)


def _by_group(x: Tensor, num_groups: int) -> Tensor:
    """Return heads [n, q, d] as those of their groups, one after another: [groups, n/groups q, d]."""
    return x.reshape(num_groups, -1, x.shape[-1])


def _context_like(query: Tensor) -> Tensor:
    """Return memory in the order in which the layer goes on: [b, a, s, d] that is a view of [s, b, a, d]."""
    b, a, s, d = query.shape
    return query.new_empty(s, b, a, d).permute(1, 2, 0, 3)


@torch.library.custom_op("megatron_tds::document_attention", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, stops: Tensor | None, slopes: list[float] | None,
    first: int, window: int, scale: float, cap: float,
) -> Tensor:  # fmt: skip
    context = _context_like(query)
    scores = _Scores(query, key, starts, stops, slopes, first, window, scale, cap)
    for part in scores.parts():
        heads = scores.taken(query, part.row, part.heads)  # [n, s, d]
        k, v = (scores.taken(x, part.row, part.groups) for x in (key, value))  # 2 x [groups, s_k, d]
        own = context[part.row, part.heads]
        for tile in part.tiles:
            q = _by_group(heads[:, tile.own], len(k))
            probabilities, _ = scores.probabilities(q, k[:, tile.keys], part, tile)
            own[:, tile.own] = torch.bmm(probabilities, v[:, tile.keys]).view(len(heads), -1, v.shape[-1])
    return context


@torch.library.custom_op("megatron_tds::document_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, stops: Tensor | None,
    slopes: list[float] | None, first: int, window: int, scale: float, cap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scores = _Scores(query, key, starts, stops, slopes, first, window, scale, cap)
    found = [x.new_zeros(x.shape, dtype=scores.wide) for x in (query, key, value)]
    for part in scores.parts():
        heads, given = (scores.taken(x, part.row, part.heads) for x in (query, gradient))  # 2 x [n, s, d]
        k, v = (scores.taken(x, part.row, part.groups) for x in (key, value))  # 2 x [groups, s_k, d]
        of_query, (of_key, of_value) = found[0][part.row, part.heads], (x[part.row, part.groups] for x in found[1:])
        for tile in part.tiles:
            q, grad = (_by_group(x[:, tile.own], len(k)) for x in (heads, given))
            probabilities, tangents = scores.probabilities(q, k[:, tile.keys], part, tile)
            of_value[:, tile.keys] += torch.bmm(probabilities.transpose(1, 2), grad)
            of_scores = torch.bmm(grad, v[:, tile.keys].transpose(1, 2))  # of probabilities
            torch.ops.aten._softmax_backward_data.out(
                of_scores, probabilities, -1, probabilities.dtype, grad_input=of_scores
            )
            if tangents is not None:
                of_scores.mul_(1.0 - tangents.square_())
            of_products = of_scores.mul_(scale)
            of_query[:, tile.own] = torch.bmm(of_products, k[:, tile.keys]).view(len(heads), -1, q.shape[-1])
            of_key[:, tile.keys] += torch.bmm(of_products.transpose(1, 2), q)
    to_query, to_key, to_value = (x.to(query.dtype) for x in found)
    return to_query, to_key, to_value


@_forward.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return _context_like(query)


@_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    return first, second, third


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.numbers = inputs[5:]


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 7)


_forward.register_autograd(_gradient, setup_context=_remember)


def _products(query: torch.Size, key: torch.Size) -> int:
    """Return the FLOPs of a product of every query with the keys before it, as if all were one document."""
    b, a, s, d = query
    return b * a * s * (2 * key[2] - s + 1) * d


@register_flop_formula(torch.ops.megatron_tds.document_attention)
def _flops(query: torch.Size, key: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * _products(query, key)


@register_flop_formula(torch.ops.megatron_tds.document_attention_backward)
def _flops_of_backward(_: torch.Size, query: torch.Size, key: torch.Size, *__: Any, **___: Any) -> int:
    return 5 * _products(query, key)


# On CUDA: documents of more than ``SHORT`` tokens by ``cu_seqlens``, the others each with the keys close before it.
#
# FlashAttention starts its blocks for as many sequences as cu_seqlens has places, and its backward has memory for each.
# One place for each token, so that any sample fits, would be gigabytes. Of long documents a sample holds few, however
# many short ones there are: so the number of places is that of its length, and no host counts documents. Short ones lie
# in long sequences there, cut every ``CUT`` tokens, whose results nobody takes.

SHORT = 256
CUT = 4 * SHORT


class _Plan(NamedTuple):
    """What all layers of a stage share of a micro-batch.

    Shapes:
        is_short [b, s], queries of short documents
        cu_query, cu_key int32 [n + 1], as of ``cumulative_lengths``
        mask [b blocks, 1, SHORT, 2 SHORT], True where a query of a short document looks
    """

    is_short: Tensor
    cu_query: Tensor
    cu_key: Tensor
    mask: Tensor


def attention_by_length(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *, first: int, window: int, scale: float
) -> Tensor:
    """Return ``document_attention``, causal and without additions to the scores."""
    b, _, s, _ = query.shape
    plan = plan_of(_plan, starts, None, key.shape[2], first, window)
    by_window = _by_windows(query, key, value, plan.mask, first=first, scale=scale)
    q, k, v = (x.permute(0, 2, 1, 3).flatten(0, 1) for x in (query, key, value))  # [b s, a, d], 2 x [b s_k, g, d]
    by_length = varlen_attention(q, k, v, plan.cu_query, plan.cu_key, s, key.shape[2], scale=scale, window=window)
    return torch.where(plan.is_short[:, None, :, None], by_window, by_length.unflatten(0, (b, s)).permute(0, 2, 1, 3))


def _plan(starts: Tensor, _: None, num_keys: int, first: int, window: int) -> _Plan:
    positions = torch.arange(first, first + starts.shape[1], dtype=starts.dtype, device=starts.device)
    stops = document_stops(starts - first) + first
    is_short = stops - starts <= SHORT
    cumulative = cumulative_lengths(starts, is_short, positions, num_keys)
    return _Plan(is_short, *cumulative, _mask_of_windows(starts, first, window))


def cumulative_lengths(starts: Tensor, is_short: Tensor, positions: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Return where each sequence begins among the queries of all samples, and among the keys.

    The first sequence of a sample has no queries, and the keys ahead of those that its queries see; the last one has
    the keys behind its queries. Both, and those that are left over, are empty where queries are whole samples.

    Shapes:
        starts, is_short [b, s], positions [s]
        output 2 x int32 [n + 1], n by the shape alone
    """
    b, s = starts.shape
    begins = (starts == positions) & ~is_short  # a long document
    begins[:, 1:] |= is_short[:, 1:] & (~is_short[:, :-1] | (positions[1:] % CUT == 0))
    begins[:, 0] = True
    places = 2 * (s // (SHORT + 1)) + s // CUT + 5
    at = torch.where(begins, begins.cumsum(1), places - 1)  # from 1 on; what begins nothing goes to the last
    offsets = torch.arange(s, dtype=torch.int32, device=starts.device).expand(b, s)
    queries = torch.full((b, places), s, dtype=torch.int32, device=starts.device)
    queries.scatter_(1, at, torch.where(begins, offsets, s))
    keys = queries + positions[0]
    keys[:, 1] = torch.where(is_short[:, 0], positions[0], starts[:, 0])
    queries[:, 0], keys[:, 0] = 0, 0
    rows = torch.arange(b, dtype=torch.int32, device=starts.device).unsqueeze(1)
    return _ended(queries + rows * s, b * s), _ended(keys + rows * num_keys, b * num_keys)


def _ended(begins: Tensor, total: int) -> Tensor:
    return F.pad(begins.flatten(), (0, 1), value=total)


def _mask_of_windows(starts: Tensor, first: int, window: int) -> Tensor:
    """Return where queries look, of their own block of ``SHORT`` keys and the one before it."""
    b, s = starts.shape
    blocks = -(-s // SHORT)
    place = torch.arange(blocks * SHORT, device=starts.device).view(blocks, SHORT, 1)  # of queries, from the first one
    seen = (place[:, :1] - SHORT) + torch.arange(2 * SHORT, device=starts.device)  # [blocks, 1, 2 SHORT]
    begin = F.pad(starts - first, (0, blocks * SHORT - s), value=-first).view(b, blocks, SHORT, 1)
    is_seen = (seen >= begin) & (seen <= place) & (seen >= -first)  # [b, blocks, SHORT, 2 SHORT]
    if window:
        is_seen &= seen >= place - window
    return is_seen.flatten(0, 1).unsqueeze(1)


def _by_windows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, first: int, scale: float) -> Tensor:
    """Return attention within documents to at least the ``SHORT`` - 1 keys before each query: all of a short document.

    ``SHORT`` neighbouring queries see as many keys before them and their own.
    """
    b, _, s, _ = query.shape
    blocks = -(-s // SHORT)
    behind, ahead = blocks * SHORT - s, max(SHORT - first, 0)
    queries = F.pad(query, (0, 0, 0, behind)).unflatten(2, (blocks, SHORT))  # [b, a, blocks, SHORT, d]
    own = [F.pad(x[:, :, max(first - SHORT, 0) : first + s], (0, 0, ahead, behind)) for x in (key, value)]
    split = [x.unflatten(2, (blocks + 1, SHORT)) for x in own]
    pairs = [torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3) for x in split]  # [b, g, blocks, 2 SHORT, d]
    made = attention(*(x.transpose(1, 2).flatten(0, 1) for x in (queries, *pairs)), mask=mask, scale=scale)
    return made.unflatten(0, (b, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :s]

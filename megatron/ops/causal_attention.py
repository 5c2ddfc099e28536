"""Causal self-attention on a CPU, by blocks of queries: what lies in the future is not computed.

Some heads at a time are copied together, so that all that follows finds them in a core's caches. A block of their
queries is a product with the keys up to its own end, a softmax in place and a product with the values; backward makes
the probabilities once more, for reading them from memory would take as long. Nothing of [s, s] is kept, and the
gradients of query, key and value are written where the layer's product reads them, one beside the other.

It is an operator (``torch.library``), one node to ``--compile``. torch's own kernel, which every other case takes, goes
over whole rows of the scores in its backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from megatron.ops.attention import Drop, attention
from megatron.ops.biased_attention import is_blocked

BLOCK = 128
"""Queries of a block. Of the s x s scores (1 + BLOCK/s) / 2 are computed."""
CACHED = 2**18
"""Scores that are worked on at a time: few enough to stay in the caches from one step to the next."""


def causal_self_attention(packed: torch.Tensor, *, dropout: float = 0.0, drop: Drop | None = None) -> torch.Tensor:
    """Return ``softmax(q k^T d^-0.5) v`` where no query sees a later key.

    Shapes:
        packed [s, b, a/t, 3, d]: query, key and value of each head
        output [b, a/t, s, d]

    Args:
        drop: drops probabilities in place of ``dropout``; as ``megatron.ops.attention``, which does that.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.2.1; Dao et al. 2022, "FlashAttention", makes
    probabilities again in backward.
    """
    if is_blocked(packed) and not dropout and drop is None:
        context: torch.Tensor = _forward(packed)
        return context.permute(1, 2, 0, 3)
    return attention(*heads_of(packed), dropout=dropout, drop=drop)


def heads_of(packed: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of each head.

    Shapes:
        packed [s, b, a/t, parts, d]
        output parts x [b, a/t, s, d]
    """
    return [part.permute(1, 2, 0, 3) for part in packed.unbind(3)]


@torch.library.custom_op("megatron_tds::causal_self_attention", mutates_args=())
def _forward(packed: torch.Tensor) -> torch.Tensor:
    s, b, a, _, d = packed.shape
    flat = packed.flatten(1, 2)  # [s, n, 3, d] of n = b a heads
    context = packed.new_empty(s, b, a, d)
    rows, room = context.flatten(1, 2), _Room(packed)  # [s, n, d]
    for heads in room.groups():
        query, key, value = _parts(room.copy("heads", flat[:, heads]))
        found = room.place("context", (s, len(value), d))
        for own in room.blocks():
            probabilities = room.probabilities(query[:, own], key[:, : own.stop])
            found[own] = torch.bmm(probabilities, value[:, : own.stop]).transpose(0, 1)
        rows[:, heads] = found
    return context


@torch.library.custom_op("megatron_tds::causal_self_attention_backward", mutates_args=())
def _backward(grad: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``packed``, like it in shape; that of the context is [s, b, a, d]."""
    flat, of_context = packed.flatten(1, 2), grad.flatten(1, 2)
    found = torch.empty_like(packed, memory_format=torch.contiguous_format)
    rows, room, second = found.flatten(1, 2), _Room(packed), _Room(packed)
    for heads in room.groups():
        together = room.copy("heads", flat[:, heads])
        query, key, value = _parts(together)
        given = room.copy("given", of_context[:, heads]).transpose(0, 1)
        of_key, of_value = room.place("key", key.shape), room.place("value", value.shape)
        for own in room.blocks():
            seen, adds = slice(0, own.stop), own.stop < room.size
            probabilities = room.probabilities(query[:, own], key[:, seen])
            _put_product(of_value[:, seen], probabilities.transpose(1, 2), given[:, own], adds=adds)
            scores = second.scores(len(query), own)  # their gradient; first that of the probabilities
            torch.bmm(given[:, own], value[:, seen].transpose(1, 2), out=scores)
            torch.ops.aten._softmax_backward_data.out(scores, probabilities, -1, scores.dtype, grad_input=scores)
            _put_product(of_key[:, seen], scores.transpose(1, 2), query[:, own], adds=adds)
            query[:, own] = torch.bmm(scores, key[:, seen])  # in its place: no other block needs it
        key.copy_(of_key)
        value.copy_(of_value)
        together[:, :, :2] *= room.scale
        rows[:, heads] = together
    return found


class _Room:
    """What heads and queries are worked on together, and memory for them, used again for the next."""

    def __init__(self, packed: torch.Tensor) -> None:
        self.size, b, a, _, d = packed.shape
        self.num_heads, self.scale = b * a, d**-0.5
        rows = min(BLOCK, self.size)
        self.at_once = min(max(1, CACHED * torch.get_num_threads() // (rows * self.size)), self.num_heads)
        self.memory = packed.new_empty(self.at_once * rows * self.size)
        self.future = packed.new_full((rows, rows), float("-inf")).triu_(1)
        self.places: dict[str, torch.Tensor] = {}

    def groups(self) -> Iterator[slice]:
        """Yield the heads that are worked on together."""
        for first in range(0, self.num_heads, self.at_once):
            yield slice(first, min(first + self.at_once, self.num_heads))

    def blocks(self) -> Iterator[slice]:
        """Yield the queries of each block, the last first: they see every key."""
        for first in reversed(range(0, self.size, BLOCK)):
            yield slice(first, min(first + BLOCK, self.size))

    def place(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return memory of this shape; the first heads, of which none are more, make it."""
        if name not in self.places:
            self.places[name] = self.memory.new_empty(shape)
        return self.places[name].flatten()[: math.prod(shape)].view(shape)

    def copy(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``x`` in the place of this name."""
        return self.place(name, x.shape).copy_(x)

    def scores(self, heads: int, own: slice) -> torch.Tensor:
        """Return memory [heads, own, keys that these queries see]."""
        shape = heads, own.stop - own.start, own.stop
        return self.memory[: shape[0] * shape[1] * shape[2]].view(shape)

    def probabilities(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return the softmax of a block's scores.

        Shapes:
            query  [n, own, d], the last of the positions of ``key`` [n, seen, d]
            output [n, own, seen]
        """
        count, seen = query.shape[1], key.shape[1]
        scores = self.scores(len(query), slice(seen - count, seen))
        torch.baddbmm(scores, query, key.transpose(1, 2), beta=0, alpha=self.scale, out=scores)
        scores[:, :, seen - count :] += self.future[:count, :count]
        return torch.softmax(scores, dim=-1, out=scores)


def _put_product(place: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, adds: bool) -> None:
    if adds:
        place += torch.bmm(left, right)
    else:
        torch.bmm(left, right, out=place)


def _parts(together: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return query, key and value [n, s, d] of [s, n, 3, d], as views."""
    return together.permute(2, 1, 0, 3).unbind(0)


@_forward.register_fake
def _(packed: torch.Tensor) -> torch.Tensor:
    s, b, a, _, d = packed.shape
    return packed.new_empty(s, b, a, d)


@_backward.register_fake
def _(grad: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(packed, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return _backward(grad, *ctx.saved_tensors)


_forward.register_autograd(_gradient, setup_context=_remember)


def _products(shape: torch.Size) -> int:
    """Return the FLOPs of a product of every query with the keys it sees, itself among them."""
    s, b, a, _, d = shape
    return b * a * d * s * (s + 1)


@register_flop_formula(torch.ops.megatron_tds.causal_self_attention)
def _flops(packed: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * _products(packed)


@register_flop_formula(torch.ops.megatron_tds.causal_self_attention_backward)
def _flops_of_backward(_: torch.Size, packed: torch.Size, *__: Any, **___: Any) -> int:
    return 5 * _products(packed)

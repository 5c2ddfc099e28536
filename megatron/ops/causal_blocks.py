"""Heads and blocks of queries for ``causal_attention``: memory that stays in a core's caches, and views of it.

All is made once for the heads that are worked on together, and used again for the next ones: beside products as small
as a block's, a new view or a new place for a result takes time that is seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

CACHED = 2**18
"""Scores that a core works on at a time: few enough to stay in its caches from one product to the next."""


def queries_of_block(size: int) -> int:
    """Return the queries q of a block: of s x s scores about (1 + q/s) / 2 are computed.

    Small blocks of long rows leave a core few heads to work on together, and cost more starts than they save products.
    """
    return min(size, 64 if size <= 512 else 128)


class Room:
    """Memory for some heads that are worked on together, and their blocks, the last first: it sees every key.

    Args:
        packed: [s, b, a/t, 3, d], what the heads will come from.
        count: heads, of all samples together.
    """

    def __init__(self, packed: torch.Tensor, count: int) -> None:
        self.size, _, _, _, self.width = packed.shape
        self.scale = self.width**-0.5
        most = queries_of_block(self.size)
        self.together = packed.new_empty(3, count, self.size, self.width)
        self.query, self.key, self.value = self.together
        self.future = packed.new_full((most, most), float("-inf")).triu_(1)
        self.scores = packed.new_empty(count * most * self.size)
        self.products = packed.new_empty(count * most * self.width)
        self.blocks: Sequence[Block] = [self.block(first) for first in reversed(range(0, self.size, most))]

    def block(self, first: int) -> Block:
        """Return the block whose queries begin with ``first``."""
        return Block(self, self.own(first))

    def own(self, first: int) -> slice:
        """Return where the queries of that block lie."""
        return slice(first, min(first + queries_of_block(self.size), self.size))


class Block:
    """The queries ``own`` of a room's heads and the keys that they see, all views.

    Shapes:
        query   [n, own, d]
        keys, values [n, seen, d]
        scores  [n, own, seen]
        product [n, own, d], for a result
    """

    def __init__(self, room: Room, own: slice) -> None:
        self.own, self.scale = own, room.scale
        self.query, self.keys, self.values = room.query[:, own], room.key[:, : own.stop], room.value[:, : own.stop]
        self.scores = self.scores_in(room.scores)
        count = own.stop - own.start
        self.product = room.products[: self.query.numel()].view(self.query.shape)
        self._diagonal, self._future = self.scores[:, :, own.start :], room.future[:count, :count]
        self._keys_across = self.keys.transpose(1, 2)

    def scores_in(self, memory: torch.Tensor) -> torch.Tensor:
        """Return memory [n, own, seen]."""
        heads, count, _ = self.query.shape
        return memory[: heads * count * self.own.stop].view(heads, count, self.own.stop)

    def make_probabilities(self) -> None:
        """Put the softmax of the scores in their place."""
        put_product(self.scores, self.query, self._keys_across, self.scale)
        self._diagonal += self._future
        torch.softmax(self.scores, dim=-1, out=self.scores)


class RoomOfBackward(Room):
    """A room with memory for gradients: of the context, ``given``, of key and of value, each [n, s, d]."""

    blocks: Sequence[BlockOfBackward]

    def __init__(self, packed: torch.Tensor, count: int) -> None:
        size, width = len(packed), packed.shape[-1]
        most = queries_of_block(size)
        self.given, self.of_key, self.of_value = (packed.new_empty(count, size, width) for _ in range(3))
        self.second = packed.new_empty(count * most * size)
        added = (size - 1) // most * most  # rows; the rest are the first block's alone
        self.spare = packed.new_empty(count * added * width)
        super().__init__(packed, count)

    def block(self, first: int) -> BlockOfBackward:
        return BlockOfBackward(self, self.own(first))


class BlockOfBackward(Block):
    """A block with the gradient of its context, ``given`` [n, own, d], and ``second``, as large as its scores."""

    def __init__(self, room: RoomOfBackward, own: slice) -> None:
        super().__init__(room, own)
        self.given = room.given[:, own]
        self.second = self.scores_in(room.second)
        self.of_key = _Sum(room.of_key, own.stop, room.spare, self.scale)
        self.of_value = _Sum(room.of_value, own.stop, room.spare)


class _Sum:
    """The first ``seen`` rows of ``place`` [n, s, d], to which a block adds; the block that sees all comes first."""

    def __init__(self, place: torch.Tensor, seen: int, spare: torch.Tensor, scale: float = 1.0) -> None:
        self._rows, self._is_first, self._scale = place[:, :seen], seen == place.shape[1], scale
        self._product = self._rows if self._is_first else spare[: self._rows.numel()].view(self._rows.shape)

    def add(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add ``scale`` times the product of two matrices for each head."""
        put_product(self._product, left, right, self._scale)
        if not self._is_first:
            self._rows += self._product


def put_product(place: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """Set ``place`` to ``scale`` times the product of two matrices for each head, and return it."""
    return torch.baddbmm(place, left, right, beta=0, alpha=scale, out=place)


AnyRoom = TypeVar("AnyRoom", bound=Room)


def rooms(kind: type[AnyRoom], packed: torch.Tensor) -> Iterator[tuple[slice, AnyRoom]]:
    """Yield the heads that are worked on together, and the room for them, always the same."""
    size, num_heads = len(packed), packed.shape[1] * packed.shape[2]
    most = max(1, CACHED * torch.get_num_threads() // (queries_of_block(size) * size))
    at_once = -(-num_heads // -(-num_heads // most))  # as even as they come
    room = kind(packed, at_once)
    for start in range(0, num_heads, at_once):
        first = min(start, num_heads - at_once)  # the last ones fill the room with some that are made again
        yield slice(first, first + at_once), room

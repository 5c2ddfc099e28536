"""Best-fit-decreasing packing, done by counts: pieces of one length are interchangeable, and so are equal samples.

Pieces are placed from the longest to the shortest, each in the open sample whose room it leaves smallest, or in a new
one. Samples with the same pieces form a group, and a step places all pieces of one length that fit into one group. The
number of steps therefore follows from the number of lengths: ten million documents take no longer than ten thousand.

Source: Ding et al. 2024, "Fewer truncations improve language modeling", section 3 (arXiv 2404.10830).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Share(NamedTuple):
    """What each sample of a group holds of one length: ``per_sample`` pieces.

    The pieces of a length are numbered from 0; the group's k-th sample holds ``first`` + k * ``per_sample`` and what
    follows.
    """

    length: int
    per_sample: int
    first: int


class Group(NamedTuple):
    """``num_samples`` samples alike, each with the pieces of ``shares``, the longest first."""

    num_samples: int
    shares: tuple[Share, ...] = ()

    def part(self, start: int, stop: int) -> Group:
        """Return samples ``start`` ... ``stop`` - 1 of this group."""
        return Group(
            stop - start, tuple(share._replace(first=share.first + start * share.per_sample) for share in self.shares)
        )

    def taking(self, share: Share) -> Group:
        """Return these samples with ``share`` in addition."""
        return Group(self.num_samples, (*self.shares, share))


class _Open:
    """Groups of open samples by their room."""

    def __init__(self) -> None:
        self.groups: dict[int, list[Group]] = {}
        self._rooms = 0  # bit r is set where a sample has room for r tokens

    def add(self, room: int, group: Group) -> None:
        if group.num_samples:
            self.groups.setdefault(room, []).append(group)
            self._rooms |= 1 << room

    def tightest(self, length: int) -> int | None:
        """Return the least room of at least ``length``."""
        rooms = self._rooms >> length
        return length + (rooms & -rooms).bit_length() - 1 if rooms else None

    def take(self, room: int) -> Group:
        group = self.groups[room].pop()
        if not self.groups[room]:
            del self.groups[room]
            self._rooms ^= 1 << room
        return group


def best_fit(counts: np.ndarray, capacity: int) -> list[Group]:
    """Return the samples that hold ``counts[length]`` pieces of each length, at most ``capacity`` tokens in each.

    Args:
        counts: int64[capacity + 1]; ``counts[0]`` is 0.
    """
    samples = _Open()
    for length in np.flatnonzero(counts)[::-1].tolist():
        first, stop = 0, int(counts[length])
        while first < stop:
            room = samples.tightest(length)
            group = Group(stop - first) if room is None else samples.take(room)
            first = _place(samples, group, capacity if room is None else room, length, first, stop)
    return [group for room in sorted(samples.groups) for group in samples.groups[room]]


def _place(samples: _Open, group: Group, room: int, length: int, first: int, stop: int) -> int:
    """Put pieces ``first`` ... ``stop`` - 1 into ``group``, as far as they fit; return the first that is left.

    A sample that took a piece has less room than those beside it, so it is filled up before the next is begun.
    """
    most, num = room // length, group.num_samples
    whole = min(num, (stop - first) // most)
    samples.add(room - most * length, group.part(0, whole).taking(Share(length, most, first)))
    first += whole * most
    left = stop - first
    if left and whole < num:
        samples.add(room - left * length, group.part(whole, whole + 1).taking(Share(length, left, first)))
        first, whole = stop, whole + 1
    if group.shares:  # what is left of new samples was never opened
        samples.add(room, group.part(whole, num))
    return first

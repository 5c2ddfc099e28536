"""The parts of two dumps that are of the same numbers, joined over tensor ranks, replicas and micro-batches.

| ranks | hold |
|---|---|
| of a tensor group, with cuts told | slices: statistics add up, each slice once |
| of a tensor group, no cut told, equal numbers | copies: one of them counts |
| of a tensor group, with cuts told, gradients | slices; one whose gradient never came is of zeros |
| of a tensor group, shares of a sum | summands: means and sketches add up, norms do not |
| of a tensor group, no cut told, other numbers | parts of an unknown cut: statistics add up, sketches do not |
| replicas, micro-batches | other samples: joined as far as both dumps must be joined to hold the same ones |
| stages with a tied weight, replicas with a weight | copies |
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.debug.folder import Dump, Record, Samples
from megatron.debug.hooks import GRAD_INPUT, GRAD_OUTPUT
from megatron.debug.statistics import Statistics, joined, summed, zeros

SAME = 1e-9
"""Relative difference up to which ranks are taken to hold copies."""


@dataclass(frozen=True, slots=True)
class Key:
    """What two dumps have in common: a tensor of a step; ``call`` counts within a micro-batch, over all stages."""

    step: int
    what: str
    name: str
    call: int
    index: int


@dataclass(frozen=True)
class Joined:
    """One tensor over the samples from ``first`` up to ``stop`` (0 and 0 for a weight), as one dump has it.

    ``parts`` are the records that it was joined of, a copy left out; ``copies_differ`` says that ranks with copies of a
    weight, or of a slice, have other numbers.
    """

    key: Key
    first: int
    stop: int
    statistics: Statistics
    parts: tuple[Record, ...]
    copies_differ: bool = False

    @property
    def lead(self) -> Record:
        """The part that tells when: the first of the lowest rank, for the clocks of ranks differ."""
        return min(self.parts, key=lambda part: (part.rank, part.time_ns))


def grouped(dump: Dump) -> dict[Key, list[Record]]:
    """Return the records of each tensor, of all ranks and samples."""
    calls = _calls(dump)
    found: dict[Key, list[Record]] = defaultdict(list)
    for record in dump.records:
        call = calls.get((record.step, record.name, dump.piece(record), record.call), record.call)
        found[Key(record.step, record.what, record.name, call, record.index)].append(record)
    return dict(found)


def _calls(dump: Dump) -> dict[tuple[int, str, int, int], int]:
    """Return the number of a call over all pieces by (step, name, piece, number on its stage).

    The clocks of hosts differ, so pieces tell the order, not times.
    """
    places: dict[tuple[int, str], set[tuple[int, int]]] = defaultdict(set)
    for record in dump.records:
        if record.what == "output" and record.micro_batch == 0:
            places[record.step, record.name].add((dump.piece(record), record.call))
    return {
        (step, name, *place): number
        for (step, name), seen in places.items()
        for number, place in enumerate(sorted(seen))
    }


def paired(first: Dump, second: Dump) -> Iterator[tuple[Joined, Joined]]:
    """Yield each tensor as both dumps have it, over the smallest runs of samples that both can be joined to.

    Layers of a pipeline hand on what others will need beside their first tensor, and its gradient on the way back; of
    a dump with a pipeline and one without, only first tensors are the same, and the others that a module's own weight
    has cut. What has no dimension of samples, such as the positions of a micro-batch, is the same tensor where both
    have micro-batches of one size.
    """
    one, other = grouped(first), grouped(second)
    have_pipeline = {dump.facts["layout"].get("pipe", 1) > 1 for dump in (first, second)}

    def is_own(key: Key) -> bool:
        return key.index == 0 or all(records[key][0].cut is not None for records in (one, other))

    for key in one:
        if key in other and (len(have_pipeline) == 1 or is_own(key)) and _can_add_up(one[key], other[key]):
            for start, stop in common_spans(one[key], other[key]):
                yield join(key, one[key], start, stop), join(key, other[key], start, stop)


def _can_add_up(one: Sequence[Record], other: Sequence[Record]) -> bool:
    """Return whether the tensors of larger micro-batches are larger, where micro-batches differ in size."""
    sizes = [{r.samples.stop - r.samples.first for r in each if r.samples is not None} for each in (one, other)]
    return sizes[0] == sizes[1] or {whole_shape(r) for r in one}.isdisjoint(whole_shape(r) for r in other)


def whole_shape(record: Record) -> tuple[int, ...]:
    """Return the shape of what all ranks of a tensor group hold together, as far as a cut is told."""
    cut, shape = record.cut, record.shape
    return shape if cut is None else (*shape[: cut.dim], cut.size, *shape[cut.dim + 1 :])


def common_spans(one: Sequence[Record], other: Sequence[Record]) -> list[tuple[int, int]]:
    """Return the runs of samples between the bounds that both sets of records have."""
    if any(record.samples is None for record in (*one, *other)):
        return [(0, 0)]
    bounds = sorted(_bounds(one) & _bounds(other))
    return list(zip(bounds, bounds[1:], strict=False))


def _bounds(records: Sequence[Record]) -> set[int]:
    return {bound for record in records if record.samples is not None for bound in record.samples}


def join(key: Key, records: Sequence[Record], first: int, stop: int) -> Joined:
    """Return the tensor over the samples from ``first`` up to ``stop``."""
    by_samples: dict[Samples, list[Record]] = defaultdict(list)
    for record in records:
        own = record.samples or Samples(0, 0)
        if first <= own.first and own.stop <= stop:
            by_samples[own].append(record)
    over_ranks = [_over_ranks(each) for _, each in sorted(by_samples.items())]
    parts = tuple(part for each, _, _ in over_ranks for part in each)
    return Joined(
        key,
        first,
        stop,
        joined([statistics for _, statistics, _ in over_ranks]),
        parts,
        any(differ for _, _, differ in over_ranks),
    )


def _over_ranks(records: Sequence[Record]) -> tuple[list[Record], Statistics, bool]:
    """Return (records without copies, their statistics joined, whether copies differ) of the same samples."""
    if any(record.is_share for record in records):
        return list(records), summed([record.statistics for record in records]), False
    by_place: dict[tuple[int, ...] | None, list[Record]] = defaultdict(list)
    for record in records:
        by_place[record.cut].append(record)
    differ = any(not _are_copies(each) for each in by_place.values())
    if set(by_place) == {None}:
        if differ and records[0].samples is not None:  # parts of a cut that nobody told of
            parts = [replace(record.statistics, sketch=()) for record in records]
            return list(records), joined(parts), False
        return [records[0]], records[0].statistics, differ
    once = [each[0] for _, each in sorted(by_place.items(), key=lambda item: item[0] or ())]
    return once, joined([*(record.statistics for record in once), zeros(number_missing(once))]), differ


def number_missing(slices: Sequence[Record]) -> int:
    """Return how many numbers of a gradient none of its slices holds: no way leads from them to the loss."""
    cut = slices[0].cut
    if cut is None or slices[0].what not in (GRAD_INPUT, GRAD_OUTPUT):
        return 0
    missing = cut.size - sum(each.cut.length for each in slices if each.cut is not None)
    return missing * math.prod(whole_shape(slices[0])) // cut.size


def _are_copies(records: Sequence[Record]) -> bool:
    first = records[0].statistics
    return all(
        abs(a - b) <= SAME * max(abs(a), abs(b))
        for record in records[1:]
        for a, b in (
            (record.statistics.norm, first.norm),
            (record.statistics.largest, first.largest),
        )
    )

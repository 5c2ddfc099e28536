"""Two dumps aligned and compared."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from megatron.debug.dump_files import GRADIENT, WEIGHT, Dump, Record, Samples
from megatron.debug.hooks import GRAD_INPUT, GRAD_OUTPUT, INPUT, OUTPUT
from megatron.debug.statistics import Statistics, joined, summed, zeros

# The parts of two dumps that are of the same numbers, joined over tensor ranks, replicas and micro-batches.
#
# | ranks | hold |
# |---|---|
# | of a tensor group, with cuts told | slices: statistics add up, each slice once |
# | of a tensor group, no cut told, equal numbers | copies: one of them counts |
# | of a tensor group, with cuts told, gradients | slices; one whose gradient never came is of zeros |
# | of a tensor group, shares of a sum | summands: means and sketches add up, norms do not |
# | of a tensor group, no cut told, other numbers | parts of an unknown cut: statistics add up, sketches do not |
# | replicas, micro-batches | other samples: joined as far as both dumps must be joined to hold the same ones |
# | stages with a tied weight, replicas with a weight | copies |

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


# How far two dumps lie apart, tensor by tensor in the order of the run, and the first one beyond its tolerance.

PHASES = {WEIGHT: "weights", INPUT: "forward", OUTPUT: "forward", GRAD_OUTPUT: "backward", GRAD_INPUT: "backward",
          GRADIENT: "gradients"}  # fmt: skip
ORDER = ("weights", "forward", "backward", "gradients")
"""Of a step, in which a difference is looked for."""
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
"""Relative, by the coarser number format of the two runs: what other sums in another order come to."""
LATER = 10.0
"""Times as much behind the first step: Adam makes steps of the rounding of gradients that are zero by symmetry."""
UNJUDGED = math.inf
"""Of weights behind the first step, for the same reason."""
SMALLEST_SHARE = 1e-6
"""Of the largest norm of its kind in the step: tensors below it are zero by symmetry; their rounding is no error."""


@dataclass(frozen=True)
class Difference:
    """How two dumps differ in one tensor over some samples.

    Attributes:
        error: relative to the norm, or to the largest number; infinite where one has NaN or infinity and the other not.
        tolerance: up to which it counts as none.
        place: by which the tensors of a phase are in the order of the first run.
        by_tensors: ``error`` is of the tensors themselves rather than of their statistics.
        copies: names of dumps whose ranks do not agree on what they hold copies of.
    """

    key: Key
    samples: tuple[int, int]
    error: float
    tolerance: float
    one: Statistics
    other: Statistics
    micro_batch: int | None
    place: tuple[int, int]
    by_tensors: bool = False
    copies: tuple[str, ...] = ()

    @property
    def phase(self) -> str:
        return PHASES[self.key.what]

    @property
    def is_beyond(self) -> bool:
        return self.error > self.tolerance or bool(self.copies)


@dataclass(frozen=True)
class Comparison:
    """All differences in the order of the first run, and what only one of the dumps has of steps that both have."""

    differences: list[Difference]
    only_first: list[Key]
    only_second: list[Key]

    @property
    def first(self) -> Difference | None:
        """The first one beyond its tolerance."""
        return next((each for each in self.differences if each.is_beyond), None)


def compare(first: Dump, second: Dump, rtol: float | None = None) -> Comparison:
    """Return how far the two dumps lie apart.

    Args:
        rtol: tolerance of all steps; None: by the number formats.

    Raises:
        ValueError: they have no tensor in common.
    """
    pairs = list(paired(first, second))
    start = min((one.key.step for one, _ in pairs), default=0)
    if not pairs:
        raise ValueError(
            "the dumps must have a tensor of a step in common, got none: other steps (--debug-dump-steps), other "
            "modules (--debug-dump-modules) or another model"
        )
    floors = _floors(pairs)
    usual = max(TOLERANCE[dump.facts["dtype"]] for dump in (first, second))
    tolerance = (usual, usual * LATER) if rtol is None else (rtol, rtol)
    found = [
        _difference(
            first, second, one, other, _tolerance(one.key, tolerance, start), floors[one.key.step, one.key.what]
        )
        for one, other in pairs
    ]
    found.sort(key=lambda each: (each.key.step, ORDER.index(each.phase), each.place))
    one, other = grouped(first), grouped(second)
    steps = {key.step for key in one} & {key.step for key in other}
    only = [[key for key in a if key not in b and key.step in steps] for a, b in ((one, other), (other, one))]
    return Comparison(found, *only)


def _floors(pairs: Iterable[tuple[Joined, Joined]]) -> dict[tuple[int, str], tuple[float, float]]:
    """Return the smallest norm and number that errors are related to, by step and kind."""
    norms: dict[tuple[int, str], list[float]] = defaultdict(list)
    numbers: dict[tuple[int, str], list[float]] = defaultdict(list)
    for pair in pairs:
        for each in pair:
            norms[each.key.step, each.key.what].append(_known(each.statistics.norm))
            numbers[each.key.step, each.key.what].append(_known(each.statistics.largest))
    return {key: (SMALLEST_SHARE * max(norms[key]), SMALLEST_SHARE * max(numbers[key])) for key in norms}


def _tolerance(key: Key, of_steps: tuple[float, float], start: int) -> float:
    """Return up to which error a tensor agrees.

    Args:
        of_steps: of the first step and of later ones.
        start: the first step that both dumps have.
    """
    if key.what == WEIGHT and key.step > start:
        return UNJUDGED
    return of_steps[key.step > start]


def _difference(
    first: Dump, second: Dump, one: Joined, other: Joined, tolerance: float, floor: tuple[float, float]
) -> Difference:
    a, b = one.statistics, other.statistics
    exact = _tensor_error(first, second, one, other, floor[0])
    micro_batches = {part.micro_batch for part in one.parts}
    return Difference(
        one.key,
        (one.first, one.stop),
        statistics_error(a, b, *floor) if exact is None else exact,
        tolerance,
        a,
        b,
        micro_batches.pop() if len(micro_batches) == 1 else None,
        _place(first, one),
        exact is not None,
        tuple(str(dump.folder) for dump, each in ((first, one), (second, other)) if each.copies_differ),
    )


def _place(dump: Dump, one: Joined) -> tuple[int, int]:
    """Return (piece, time), by one rank's clock; a backward goes through the pieces in reverse."""
    piece = dump.piece(one.lead)
    return -piece if PHASES[one.key.what] == "backward" else piece, one.lead.time_ns


def statistics_error(a: Statistics, b: Statistics, norm_floor: float = 0.0, number_floor: float = 0.0) -> float:
    """Return about how far the tensors are apart, relative to their norm, by what is known of them."""
    if (a.nan, a.inf) != (b.nan, b.inf) or a.count != b.count:
        return math.inf
    norm, number = max(_known(a.norm), _known(b.norm), norm_floor), max(_known(a.largest), _known(b.largest))
    errors = [_share(_known(a.norm - b.norm), norm), _share(_known(a.largest - b.largest), max(number, number_floor))]
    rows = [(a.total, b.total), *(zip(a.sketch, b.sketch, strict=True) if a.sketch and b.sketch else ())]
    size = max(_rms([row[0] for row in rows]), _rms([row[1] for row in rows]), norm)
    errors.append(_share(_rms([x - y for x, y in rows]), size))
    return max(errors)


def _known(value: float) -> float:
    """Return the value, 0 where it is not known."""
    return 0.0 if math.isnan(value) else value


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values) / len(values))


def _share(part: float, whole: float) -> float:
    return abs(part) / whole if whole > 0.0 else 0.0


def _tensor_error(first: Dump, second: Dump, one: Joined, other: Joined, floor: float) -> float | None:
    """Return the relative norm of the difference, where both dumps hold the tensors of the same samples."""
    if any(part.file is None for part in (*one.parts, *other.parts)):
        return None
    a, b = _whole(first, one.parts), _whole(second, other.parts)
    if a is None or b is None or a.shape != b.shape:
        return None
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        if not torch.equal(kind(a), kind(b)):
            return math.inf
    a, b = (x.nan_to_num(0.0, 0.0, 0.0) for x in (a, b))
    norm = max(float(a.norm()), float(b.norm()), floor)
    return _share(float((a - b).norm()), norm)


def _whole(dump: Dump, parts: Sequence[Record]) -> torch.Tensor | None:
    """Return the tensor joined of its slices or shares; None where parts are of other samples or of an unknown cut."""
    is_sum = any(part.is_share for part in parts)
    if len({part.samples for part in parts}) > 1 or (len(parts) > 1 and parts[0].cut is None and not is_sum):
        return None
    tensors = [dump.tensor(part) for part in parts]
    if is_sum:
        return torch.stack(tensors).sum(0)
    cut = parts[0].cut
    if cut is None:
        return tensors[0]
    if not number_missing(parts):
        return torch.cat(tensors, dim=cut.dim)
    whole = tensors[0].new_zeros(whole_shape(parts[0]))
    for part, tensor in zip(parts, tensors, strict=True):
        whole.narrow(cut.dim, part.cut.start if part.cut else 0, tensor.shape[cut.dim]).copy_(tensor)
    return whole


def worst_by_name(differences: Iterable[Difference], step: int, phase: str) -> dict[str, float]:
    """Return name -> largest error of a phase of a step, in the order of the run."""
    found: dict[str, float] = {}
    for each in differences:
        if each.key.step == step and each.phase == phase:
            found[each.key.name] = max(found.get(each.key.name, 0.0), each.error)
    return found

"""compare: alignment and comparison of two dumps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from megatron.debug.dump_files import GRADIENT, WEIGHT, Dump, Record, Samples
from megatron.debug.hooks import GRAD_INPUT, GRAD_OUTPUT, INPUT, OUTPUT
from megatron.debug.statistics import Statistics, joined, summed, zeros

# Corresponding tensors of two dumps, joined over tensor ranks, replicas and micro-batches.
#
# | records | joined as |
# |---|---|
# | of a tensor group, with known cuts | slices: statistics add up, each slice once |
# | of a tensor group, with known cuts, gradients | slices; a slice without a gradient counts as zeros |
# | of a tensor group, without cuts, equal statistics | copies: one of them counts |
# | of a tensor group, without cuts, other statistics | slices of an unknown cut: statistics add up, sketches do not |
# | of a tensor group, shares of a sum | summands: means and sketches add up, norms do not |
# | of replicas and micro-batches | other samples: joined until both dumps cover the same samples |
# | of a weight on several replicas, of a tied weight on several stages | copies |

SAME = 1e-9
"""Relative difference up to which ranks are assumed to hold copies."""


@dataclass(frozen=True, slots=True)
class Key:
    """Identifies a tensor of a step in both dumps. ``call`` counts the calls within a micro-batch, over all stages."""

    step: int
    what: str
    name: str
    call: int
    index: int


@dataclass(frozen=True)
class Joined:
    """One tensor of a dump over the samples from ``first`` up to ``stop`` (0 and 0 for a weight).

    ``parts`` are the records from which it was joined, without copies. ``copies_differ`` is True if ranks with copies
    of a weight, or of a slice, have different statistics.
    """

    key: Key
    first: int
    stop: int
    statistics: Statistics
    parts: tuple[Record, ...]
    copies_differ: bool = False

    @property
    def lead(self) -> Record:
        """The earliest part of the lowest rank, whose time determines the order; clocks of different ranks differ."""
        return min(self.parts, key=lambda part: (part.rank, part.time_ns))


def grouped(dump: Dump) -> dict[Key, list[Record]]:
    """Return the records of each tensor, over all ranks and samples."""
    calls = _calls(dump)
    records_by_key: dict[Key, list[Record]] = defaultdict(list)
    for record in dump.records:
        call = calls.get((record.step, record.name, dump.piece(record), record.call), record.call)
        records_by_key[Key(record.step, record.what, record.name, call, record.index)].append(record)
    return dict(records_by_key)


def _calls(dump: Dump) -> dict[tuple[int, str, int, int], int]:
    """Return the index of each call over all pieces, by (step, name, piece, index on its stage).

    Calls are ordered by piece rather than by time, because the clocks of hosts differ.
    """
    calls: dict[tuple[int, str], set[tuple[int, int]]] = defaultdict(set)
    for record in dump.records:
        if record.what == "output" and record.micro_batch == 0:
            calls[record.step, record.name].add((dump.piece(record), record.call))
    return {
        (step, name, *call): idx
        for (step, name), seen_calls in calls.items()
        for idx, call in enumerate(sorted(seen_calls))
    }


def paired(first: Dump, second: Dump) -> Iterator[tuple[Joined, Joined]]:
    """Yield each tensor that both dumps contain, joined over the smallest ranges of samples that both dumps record.

    In a pipeline, layers also receive and return tensors that they only forward to later layers, and the gradients of
    these tensors. If only one of the dumps has a pipeline, a tensor is comparable only if it is the first input or
    output of its module, or if its cut is known from the module's own weight. A tensor without a dimension of samples,
    such as the positions of a micro-batch, is comparable only if both dumps have the same micro-batch size.
    """
    first_records, second_records = grouped(first), grouped(second)
    have_pipeline = {dump.facts["layout"].get("pipe", 1) > 1 for dump in (first, second)}

    def is_own(key: Key) -> bool:
        return key.index == 0 or all(records[key][0].cut is not None for records in (first_records, second_records))

    for key in first_records:
        if (
            key in second_records
            and (len(have_pipeline) == 1 or is_own(key))
            and _can_add_up(first_records[key], second_records[key])
        ):
            for start, stop in common_spans(first_records[key], second_records[key]):
                yield join(key, first_records[key], start, stop), join(key, second_records[key], start, stop)


def _can_add_up(one: Sequence[Record], other: Sequence[Record]) -> bool:
    """Return True if a tensor's records can be joined over samples, so that both dumps are comparable.

    The micro-batches of both dumps must have the same size, or the shapes must differ, which shows that the tensor has
    a dimension of samples.
    """
    sizes = [{r.samples.stop - r.samples.first for r in records if r.samples is not None} for records in (one, other)]
    return sizes[0] == sizes[1] or {whole_shape(r) for r in one}.isdisjoint(whole_shape(r) for r in other)


def whole_shape(record: Record) -> tuple[int, ...]:
    """Return the shape of the full tensor over its tensor group; the shape on the rank if the cut is unknown."""
    cut, shape = record.cut, record.shape
    return shape if cut is None else (*shape[: cut.dim], cut.size, *shape[cut.dim + 1 :])


def common_spans(one: Sequence[Record], other: Sequence[Record]) -> list[tuple[int, int]]:
    """Return the ranges of samples between the bounds that both sets of records have."""
    if any(record.samples is None for record in (*one, *other)):
        return [(0, 0)]
    bounds = sorted(_bounds(one) & _bounds(other))
    return list(zip(bounds, bounds[1:], strict=False))


def _bounds(records: Sequence[Record]) -> set[int]:
    return {bound for record in records if record.samples is not None for bound in record.samples}


def join(key: Key, records: Sequence[Record], first: int, stop: int) -> Joined:
    """Join the records of the samples from ``first`` up to ``stop``."""
    by_samples: dict[Samples, list[Record]] = defaultdict(list)
    for record in records:
        record_samples = record.samples or Samples(0, 0)
        if first <= record_samples.first and record_samples.stop <= stop:
            by_samples[record_samples].append(record)
    over_ranks = [_over_ranks(group) for _, group in sorted(by_samples.items())]
    parts = tuple(part for group, _, _ in over_ranks for part in group)
    return Joined(
        key,
        first,
        stop,
        joined([statistics for _, statistics, _ in over_ranks]),
        parts,
        any(differ for _, _, differ in over_ranks),
    )


def _over_ranks(records: Sequence[Record]) -> tuple[list[Record], Statistics, bool]:
    """Return (records without copies, their joined statistics, True if copies differ) for the same samples."""
    if any(record.is_share for record in records):
        return list(records), summed([record.statistics for record in records]), False
    by_cut: dict[tuple[int, ...] | None, list[Record]] = defaultdict(list)
    for record in records:
        by_cut[record.cut].append(record)
    differ = any(not _are_copies(copies) for copies in by_cut.values())
    if set(by_cut) == {None}:
        if differ and records[0].samples is not None:  # slices of an unknown cut
            slice_statistics = [replace(record.statistics, sketch=()) for record in records]
            return list(records), joined(slice_statistics), False
        return [records[0]], records[0].statistics, differ
    slices = [copies[0] for _, copies in sorted(by_cut.items(), key=lambda item: item[0] or ())]
    return slices, joined([*(record.statistics for record in slices), zeros(number_missing(slices))]), differ


def number_missing(slices: Sequence[Record]) -> int:
    """Return the number of elements of a gradient that no slice contains, because they do not affect the loss."""
    cut = slices[0].cut
    if cut is None or slices[0].what not in (GRAD_INPUT, GRAD_OUTPUT):
        return 0
    missing = cut.size - sum(record.cut.length for record in slices if record.cut is not None)
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


# Differences of two dumps, tensor by tensor in the order of the run, and the first one beyond its tolerance.

PHASES = {WEIGHT: "weights", INPUT: "forward", OUTPUT: "forward", GRAD_OUTPUT: "backward", GRAD_INPUT: "backward",
          GRADIENT: "gradients"}  # fmt: skip
ORDER = ("weights", "forward", "backward", "gradients")
"""Order of the phases of a step in which differences are listed."""
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
"""Relative tolerance by the coarser dtype of the two runs: the effect of sums in another order."""
LATER = 10.0
"""Factor of the tolerance after the first step: Adam turns the rounding of gradients that should be zero into steps."""
UNJUDGED = math.inf
"""Tolerance of weights after the first step, for the same reason."""
SMALLEST_SHARE = 1e-6
"""Errors are relative to at least this fraction of the step's largest norm of the same kind of tensor.

Smaller tensors are zero by symmetry, up to rounding.
"""


@dataclass(frozen=True)
class Difference:
    """Difference of two dumps in one tensor over some samples.

    Attributes:
        error: relative to the norm, or to the largest value; infinite if only one dump has NaN or infinity.
        tolerance: largest error that is not reported.
        place: sort key of the tensor within its phase, in the order of the first run.
        by_tensors: ``error`` is computed from the tensors rather than from their statistics.
        copies: names of the dumps in which copies of the tensor differ between ranks.
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
    """All differences in the order of the first run, and tensors that only one dump has in steps that both have."""

    differences: list[Difference]
    only_first: list[Key]
    only_second: list[Key]

    @property
    def first(self) -> Difference | None:
        """First difference beyond its tolerance."""
        return next((difference for difference in self.differences if difference.is_beyond), None)


def compare(first: Dump, second: Dump, rtol: float | None = None) -> Comparison:
    """Compare two dumps.

    Args:
        rtol: tolerance of all steps; None: by the dtypes of the runs.

    Raises:
        ValueError: the dumps have no tensor in common.
    """
    pairs = list(paired(first, second))
    start = min((one.key.step for one, _ in pairs), default=0)
    if not pairs:
        raise ValueError(
            "the dumps have no tensor of the same step in common: their steps (--debug-dump-steps), modules "
            "(--debug-dump-modules) or models differ"
        )
    floors = _floors(pairs)
    step_tolerance = max(TOLERANCE[dump.facts["dtype"]] for dump in (first, second))
    tolerance = (step_tolerance, step_tolerance * LATER) if rtol is None else (rtol, rtol)
    differences = [
        _difference(
            first, second, one, other, _tolerance(one.key, tolerance, start), floors[one.key.step, one.key.what]
        )
        for one, other in pairs
    ]
    differences.sort(key=lambda each: (each.key.step, ORDER.index(each.phase), each.place))
    one, other = grouped(first), grouped(second)
    steps = {key.step for key in one} & {key.step for key in other}
    only = [[key for key in a if key not in b and key.step in steps] for a, b in ((one, other), (other, one))]
    return Comparison(differences, *only)


def _floors(pairs: Iterable[tuple[Joined, Joined]]) -> dict[tuple[int, str], tuple[float, float]]:
    """Return the smallest norm and value to which errors are relative, by step and kind of tensor."""
    norms: dict[tuple[int, str], list[float]] = defaultdict(list)
    values: dict[tuple[int, str], list[float]] = defaultdict(list)
    for pair in pairs:
        for tensor in pair:
            norms[tensor.key.step, tensor.key.what].append(_known(tensor.statistics.norm))
            values[tensor.key.step, tensor.key.what].append(_known(tensor.statistics.largest))
    return {key: (SMALLEST_SHARE * max(norms[key]), SMALLEST_SHARE * max(values[key])) for key in norms}


def _tolerance(key: Key, of_steps: tuple[float, float], start: int) -> float:
    """Return the tolerance of a tensor.

    Args:
        of_steps: tolerances of the first step and of later steps.
        start: first step that both dumps have.
    """
    if key.what == WEIGHT and key.step > start:
        return UNJUDGED
    return of_steps[key.step > start]


def _difference(
    first: Dump, second: Dump, one: Joined, other: Joined, tolerance: float, floor: tuple[float, float]
) -> Difference:
    a, b = one.statistics, other.statistics
    tensor_error = _tensor_error(first, second, one, other, floor[0])
    micro_batches = {part.micro_batch for part in one.parts}
    return Difference(
        one.key,
        (one.first, one.stop),
        statistics_error(a, b, *floor) if tensor_error is None else tensor_error,
        tolerance,
        a,
        b,
        micro_batches.pop() if len(micro_batches) == 1 else None,
        _place(first, one),
        tensor_error is not None,
        tuple(str(dump.folder) for dump, tensor in ((first, one), (second, other)) if tensor.copies_differ),
    )


def _place(dump: Dump, one: Joined) -> tuple[int, int]:
    """Return (piece, time on one rank's clock); the pieces of a backward are in reverse order."""
    piece = dump.piece(one.lead)
    return -piece if PHASES[one.key.what] == "backward" else piece, one.lead.time_ns


def statistics_error(a: Statistics, b: Statistics, norm_floor: float = 0.0, number_floor: float = 0.0) -> float:
    """Return an estimate of the difference of two tensors relative to their norm, given their statistics."""
    if (a.nan, a.inf) != (b.nan, b.inf) or a.count != b.count:
        return math.inf
    norm, largest = max(_known(a.norm), _known(b.norm), norm_floor), max(_known(a.largest), _known(b.largest))
    errors = [_share(_known(a.norm - b.norm), norm), _share(_known(a.largest - b.largest), max(largest, number_floor))]
    rows = [(a.total, b.total), *(zip(a.sketch, b.sketch, strict=True) if a.sketch and b.sketch else ())]
    size = max(_rms([row[0] for row in rows]), _rms([row[1] for row in rows]), norm)
    errors.append(_share(_rms([x - y for x, y in rows]), size))
    return max(errors)


def _known(value: float) -> float:
    """Return ``value``, or 0 if it is unknown (NaN)."""
    return 0.0 if math.isnan(value) else value


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values) / len(values))


def _share(part: float, whole: float) -> float:
    return abs(part) / whole if whole > 0.0 else 0.0


def _tensor_error(first: Dump, second: Dump, one: Joined, other: Joined, floor: float) -> float | None:
    """Return the relative norm of the difference, computed from tensors; None if they are missing or not comparable."""
    if any(part.file is None for part in (*one.parts, *other.parts)):
        return None
    a, b = _whole(first, one.parts), _whole(second, other.parts)
    if a is None or b is None or a.shape != b.shape:
        return None
    for predicate in (torch.isnan, torch.isposinf, torch.isneginf):
        if not torch.equal(predicate(a), predicate(b)):
            return math.inf
    a, b = (x.nan_to_num(0.0, 0.0, 0.0) for x in (a, b))
    norm = max(float(a.norm()), float(b.norm()), floor)
    return _share(float((a - b).norm()), norm)


def _whole(dump: Dump, parts: Sequence[Record]) -> torch.Tensor | None:
    """Join a tensor from its slices or summands; None if parts have different samples or an unknown cut."""
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
    full = tensors[0].new_zeros(whole_shape(parts[0]))
    for part, tensor in zip(parts, tensors, strict=True):
        full.narrow(cut.dim, part.cut.start if part.cut else 0, tensor.shape[cut.dim]).copy_(tensor)
    return full


def worst_by_name(differences: Iterable[Difference], step: int, phase: str) -> dict[str, float]:
    """Return the largest error of each name in a phase of a step, in the order of the run."""
    errors: dict[str, float] = {}
    for difference in differences:
        if difference.key.step == step and difference.phase == phase:
            errors[difference.key.name] = max(errors.get(difference.key.name, 0.0), difference.error)
    return errors

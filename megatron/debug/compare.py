"""Alignment and comparison of two dumps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from megatron.debug.dump_files import GRADIENT, WEIGHT, Dump, Record, SampleRange
from megatron.debug.hooks import GRAD_INPUT, GRAD_OUTPUT, INPUT, OUTPUT
from megatron.debug.statistics import Statistics, join_statistics, sum_statistics, zero_statistics

# To compare a tensor in two dumps, each dump's records are joined over tensor ranks, replicas and micro-batches.
#
# | records | joined as |
# |---|---|
# | ranks of a tensor group, slices known | slices: statistics add up, each slice counts once |
# | ... gradients | slices; elements that no slice contains count as zeros |
# | ranks of a tensor group, slices unknown, equal statistics | copies: only one counts |
# | ranks of a tensor group, slices unknown, different statistics | slices: statistics add up, sketches are dropped |
# | ranks of a tensor group, partial sums | summands: means and sketches add up, norms become NaN |
# | replicas and micro-batches | different samples: joined up to the next sample bound that both dumps have |
# | a weight on several replicas, a tied weight on several stages | copies |

COPY_RTOL = 1e-9
"""Ranks are assumed to hold copies if their statistics differ by at most this relative amount."""


@dataclass(frozen=True, slots=True)
class TensorKey:
    """Identifies a tensor at a step in both dumps.

    ``call`` is the module's call index within the micro-batch, over all stages.
    """

    step: int
    tensor_type: str
    name: str
    call: int
    index: int


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor in a dump, joined over the samples in [``first``, ``stop``), which is [0, 0) for weights.

    ``records`` are the joined records, without copies. ``copies_differ`` is True if copies of a weight or slice on
    different ranks have different statistics.
    """

    key: TensorKey
    first: int
    stop: int
    statistics: Statistics
    records: tuple[Record, ...]
    copies_differ: bool = False

    @property
    def first_record(self) -> Record:
        """Earliest record on the lowest rank. Its time orders the tensors, because clocks differ between ranks."""
        return min(self.records, key=lambda record: (record.rank, record.time_ns))


def group_records(dump: Dump) -> dict[TensorKey, list[Record]]:
    """Group the records of all ranks and samples by tensor."""
    calls = _call_indices(dump)
    records_by_key: dict[TensorKey, list[Record]] = defaultdict(list)
    for record in dump.records:
        call = calls.get((record.step, record.name, dump.global_chunk_idx(record), record.call), record.call)
        records_by_key[TensorKey(record.step, record.what, record.name, call, record.index)].append(record)
    return dict(records_by_key)


def _call_indices(dump: Dump) -> dict[tuple[int, str, int, int], int]:
    """Map (step, name, virtual stage, call index on that stage) to the call index over all virtual stages.

    Calls are ordered by virtual stage rather than by time, because host clocks differ.
    """
    calls: dict[tuple[int, str], set[tuple[int, int]]] = defaultdict(set)
    for record in dump.records:
        if record.what == "output" and record.micro_batch == 0:
            calls[record.step, record.name].add((dump.global_chunk_idx(record), record.call))
    return {
        (step, name, *call): idx
        for (step, name), seen_calls in calls.items()
        for idx, call in enumerate(sorted(seen_calls))
    }


def pair_tensors(first: Dump, second: Dump) -> Iterator[tuple[JoinedTensor, JoinedTensor]]:
    """Yield (first, second) for each tensor that both dumps contain and each sample range that both dumps have.

    The sample ranges are the smallest over which both dumps' records can be joined.

    In a pipeline, layers' inputs and outputs include tensors that a layer only passes on to later layers. If only
    one of the dumps has a pipeline, a tensor is therefore comparable only if it is the first input or output of its
    module, or if its slice is known from the module's weight. A tensor without a sample dimension, such as a
    micro-batch's positions, is comparable only if both dumps have the same micro-batch size.
    """
    first_records, second_records = group_records(first), group_records(second)
    have_pipeline = {dump.manifest["layout"].get("pipe", 1) > 1 for dump in (first, second)}

    def is_comparable_key(key: TensorKey) -> bool:
        return key.index == 0 or all(records[key][0].cut is not None for records in (first_records, second_records))

    for key in first_records:
        if (
            key in second_records
            and (len(have_pipeline) == 1 or is_comparable_key(key))
            and _can_join(first_records[key], second_records[key])
        ):
            for start, stop in common_ranges(first_records[key], second_records[key]):
                yield (
                    join_records(key, first_records[key], start, stop),
                    join_records(key, second_records[key], start, stop),
                )


def _can_join(first_records: Sequence[Record], second_records: Sequence[Record]) -> bool:
    """Check if a tensor's records can be joined over samples.

    Either both dumps have the same micro-batch size, or the tensor's shapes differ between the dumps, which implies a
    sample dimension.
    """
    range_sizes = [
        {record.samples.stop - record.samples.first for record in records if record.samples is not None}
        for records in (first_records, second_records)
    ]
    return range_sizes[0] == range_sizes[1] or {full_shape(record) for record in first_records}.isdisjoint(
        full_shape(record) for record in second_records
    )


def full_shape(record: Record) -> tuple[int, ...]:
    """Look up the unsharded tensor's shape, or the local shape if the slice is unknown."""
    shard_slice, shape = record.cut, record.shape
    return (
        shape if shard_slice is None else (*shape[: shard_slice.dim], shard_slice.size, *shape[shard_slice.dim + 1 :])
    )


def common_ranges(first_records: Sequence[Record], second_records: Sequence[Record]) -> list[tuple[int, int]]:
    """Find the sample ranges between the consecutive bounds that occur in both record sets."""
    if any(record.samples is None for record in (*first_records, *second_records)):
        return [(0, 0)]
    bounds = sorted(_bounds(first_records) & _bounds(second_records))
    return list(zip(bounds, bounds[1:], strict=False))


def _bounds(records: Sequence[Record]) -> set[int]:
    return {bound for record in records if record.samples is not None for bound in record.samples}


def join_records(key: TensorKey, records: Sequence[Record], first: int, stop: int) -> JoinedTensor:
    """Join the records for samples in [``first``, ``stop``)."""
    by_samples: dict[SampleRange, list[Record]] = defaultdict(list)
    for record in records:
        record_samples = record.samples or SampleRange(0, 0)
        if first <= record_samples.first and record_samples.stop <= stop:
            by_samples[record_samples].append(record)
    joined_ranks = [_join_ranks(group) for _, group in sorted(by_samples.items())]
    unique_records = tuple(unique_record for group, _, _ in joined_ranks for unique_record in group)
    return JoinedTensor(
        key,
        first,
        stop,
        join_statistics([statistics for _, statistics, _ in joined_ranks]),
        unique_records,
        any(differ for _, _, differ in joined_ranks),
    )


def _join_ranks(records: Sequence[Record]) -> tuple[list[Record], Statistics, bool]:
    """Join all ranks' records for the same samples.

    Returns:
        (records without copies, joined statistics, True if copies differ)
    """
    if any(record.is_share for record in records):
        return list(records), sum_statistics([record.statistics for record in records]), False
    by_cut: dict[tuple[int, ...] | None, list[Record]] = defaultdict(list)
    for record in records:
        by_cut[record.cut].append(record)
    differ = any(not _are_copies(copies) for copies in by_cut.values())
    if set(by_cut) == {None}:
        if differ and records[0].samples is not None:  # unknown slices
            slice_statistics = [replace(record.statistics, sketch=()) for record in records]
            return list(records), join_statistics(slice_statistics), False
        return [records[0]], records[0].statistics, differ
    slices = [copies[0] for _, copies in sorted(by_cut.items(), key=lambda item: item[0] or ())]
    return (
        slices,
        join_statistics([*(record.statistics for record in slices), zero_statistics(num_missing(slices))]),
        differ,
    )


def num_missing(slices: Sequence[Record]) -> int:
    """Count the gradient elements that are in no slice; these elements do not affect the loss."""
    shard_slice = slices[0].cut
    if shard_slice is None or slices[0].what not in (GRAD_INPUT, GRAD_OUTPUT):
        return 0
    num_indices = shard_slice.size - sum(record.cut.length for record in slices if record.cut is not None)
    return num_indices * math.prod(full_shape(slices[0])) // shard_slice.size


def _are_copies(records: Sequence[Record]) -> bool:
    first = records[0].statistics
    return all(
        abs(a - b) <= COPY_RTOL * max(abs(a), abs(b))
        for record in records[1:]
        for a, b in (
            (record.statistics.norm, first.norm),
            (record.statistics.largest, first.largest),
        )
    )


# Differences between two dumps for each tensor, in execution order, and the first difference beyond its tolerance.

PHASES = {WEIGHT: "weights", INPUT: "forward", OUTPUT: "forward", GRAD_OUTPUT: "backward", GRAD_INPUT: "backward",
          GRADIENT: "gradients"}  # fmt: skip
ORDER = ("weights", "forward", "backward", "gradients")
"""Order in which differences of a step are listed, by phase."""
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
"""Relative tolerance for a different order of summation, by the less precise dtype of the two runs."""
LATER_STEP_FACTOR = 10.0
"""Factor on the tolerance after the first step: Adam amplifies rounding errors of gradients that should be zero."""
NO_LIMIT = math.inf
"""Tolerance of weights after the first step, for the same reason as ``LATER_STEP_FACTOR``."""
MIN_NORM_FRACTION = 1e-6
"""Minimum denominator of relative errors, as a fraction of the step's largest norm for the tensor type.

Tensors with smaller norms are zero by symmetry, up to rounding.
"""


@dataclass(frozen=True)
class Difference:
    """Difference between two dumps for one tensor and a sample range.

    Attributes:
        error: relative to the norm or to the largest value; infinite if the dumps differ in the number of elements,
            of NaNs or of infinities.
        tolerance: largest error that is not reported.
        order: the tensor's sort key within its phase, from the execution order of the first run.
        is_from_tensors: ``error`` is computed from the tensors rather than from their statistics.
        differing_copies: dump folders in which copies of the tensor differ between ranks.
    """

    key: TensorKey
    samples: tuple[int, int]
    error: float
    tolerance: float
    first_statistics: Statistics
    second_statistics: Statistics
    micro_batch: int | None
    order: tuple[int, int]
    is_from_tensors: bool = False
    differing_copies: tuple[str, ...] = ()

    @property
    def phase(self) -> str:
        return PHASES[self.key.tensor_type]

    @property
    def is_beyond_tolerance(self) -> bool:
        return self.error > self.tolerance or bool(self.differing_copies)


@dataclass(frozen=True)
class Comparison:
    """All differences in the first run's execution order, and tensors at common steps that only one dump contains."""

    differences: list[Difference]
    only_first: list[TensorKey]
    only_second: list[TensorKey]

    @property
    def first(self) -> Difference | None:
        """First difference beyond its tolerance."""
        return next((difference for difference in self.differences if difference.is_beyond_tolerance), None)


def compare(first: Dump, second: Dump, rtol: float | None = None) -> Comparison:
    """Compare two dumps.

    Args:
        rtol: relative tolerance for all steps; None: derived from the runs' dtypes.

    Raises:
        ValueError: the dumps have no tensor in common.
    """
    pairs = list(pair_tensors(first, second))
    first_step = min((left.key.step for left, _ in pairs), default=0)
    if not pairs:
        raise ValueError(
            "the dumps have no common tensor in the same step. Both runs need the same model and overlapping "
            "--debug-dump-steps and --debug-dump-modules"
        )
    floors = _floors(pairs)
    step_tolerance = max(TOLERANCE[dump.manifest["dtype"]] for dump in (first, second))
    tolerance = (step_tolerance, step_tolerance * LATER_STEP_FACTOR) if rtol is None else (rtol, rtol)
    differences = [
        _difference(
            first,
            second,
            left,
            right,
            _tolerance(left.key, tolerance, first_step),
            floors[left.key.step, left.key.tensor_type],
        )
        for left, right in pairs
    ]
    differences.sort(key=lambda difference: (difference.key.step, ORDER.index(difference.phase), difference.order))
    left, right = group_records(first), group_records(second)
    steps = {key.step for key in left} & {key.step for key in right}
    unmatched = [[key for key in a if key not in b and key.step in steps] for a, b in ((left, right), (right, left))]
    return Comparison(differences, *unmatched)


def _floors(pairs: Iterable[tuple[JoinedTensor, JoinedTensor]]) -> dict[tuple[int, str], tuple[float, float]]:
    """Compute minimum denominators for relative errors in norms and largest values, by (step, tensor type)."""
    norms: dict[tuple[int, str], list[float]] = defaultdict(list)
    values: dict[tuple[int, str], list[float]] = defaultdict(list)
    for pair in pairs:
        for tensor in pair:
            norms[tensor.key.step, tensor.key.tensor_type].append(_nan_to_zero(tensor.statistics.norm))
            values[tensor.key.step, tensor.key.tensor_type].append(_nan_to_zero(tensor.statistics.largest))
    return {key: (MIN_NORM_FRACTION * max(norms[key]), MIN_NORM_FRACTION * max(values[key])) for key in norms}


def _tolerance(key: TensorKey, step_tolerances: tuple[float, float], first_step: int) -> float:
    """Choose a tensor's tolerance.

    Args:
        step_tolerances: tolerances for the first step and for later steps.
        first_step: first step that both dumps contain.
    """
    if key.tensor_type == WEIGHT and key.step > first_step:
        return NO_LIMIT
    return step_tolerances[key.step > first_step]


def _difference(
    first: Dump,
    second: Dump,
    first_tensor: JoinedTensor,
    second_tensor: JoinedTensor,
    tolerance: float,
    floor: tuple[float, float],
) -> Difference:
    a, b = first_tensor.statistics, second_tensor.statistics
    tensor_error = _tensor_error(first, second, first_tensor, second_tensor, floor[0])
    micro_batches = {record.micro_batch for record in first_tensor.records}
    return Difference(
        first_tensor.key,
        (first_tensor.first, first_tensor.stop),
        statistics_error(a, b, *floor) if tensor_error is None else tensor_error,
        tolerance,
        a,
        b,
        micro_batches.pop() if len(micro_batches) == 1 else None,
        _order(first, first_tensor),
        tensor_error is not None,
        tuple(
            str(dump.folder)
            for dump, tensor in ((first, first_tensor), (second, second_tensor))
            if tensor.copies_differ
        ),
    )


def _order(dump: Dump, tensor: JoinedTensor) -> tuple[int, int]:
    """Build the sort key (virtual stage, time on one rank's clock); backward visits the stages in reverse order."""
    chunk_idx = dump.global_chunk_idx(tensor.first_record)
    return -chunk_idx if PHASES[tensor.key.tensor_type] == "backward" else chunk_idx, tensor.first_record.time_ns


def statistics_error(a: Statistics, b: Statistics, norm_floor: float = 0.0, value_floor: float = 0.0) -> float:
    """Estimate the relative difference between two tensors from their statistics."""
    if (a.nan, a.inf) != (b.nan, b.inf) or a.count != b.count:
        return math.inf
    norm, largest = (
        max(_nan_to_zero(a.norm), _nan_to_zero(b.norm), norm_floor),
        max(_nan_to_zero(a.largest), _nan_to_zero(b.largest)),
    )
    errors = [
        _ratio(_nan_to_zero(a.norm - b.norm), norm),
        _ratio(_nan_to_zero(a.largest - b.largest), max(largest, value_floor)),
    ]
    rows = [(a.total, b.total), *(zip(a.sketch, b.sketch, strict=True) if a.sketch and b.sketch else ())]
    size = max(_rms([row[0] for row in rows]), _rms([row[1] for row in rows]), norm)
    errors.append(_ratio(_rms([x - y for x, y in rows]), size))
    return max(errors)


def _nan_to_zero(value: float) -> float:
    """Return ``value``, or 0 if it is unknown (NaN)."""
    return 0.0 if math.isnan(value) else value


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values) / len(values))


def _ratio(numerator: float, denominator: float) -> float:
    return abs(numerator) / denominator if denominator > 0.0 else 0.0


def _tensor_error(
    first: Dump, second: Dump, first_tensor: JoinedTensor, second_tensor: JoinedTensor, floor: float
) -> float | None:
    """Compute the relative norm of the difference between saved tensors; None if they are missing or not comparable."""
    if any(record.file is None for record in (*first_tensor.records, *second_tensor.records)):
        return None
    a, b = _full_tensor(first, first_tensor.records), _full_tensor(second, second_tensor.records)
    if a is None or b is None or a.shape != b.shape:
        return None
    for predicate in (torch.isnan, torch.isposinf, torch.isneginf):
        if not torch.equal(predicate(a), predicate(b)):
            return math.inf
    a, b = (x.nan_to_num(0.0, 0.0, 0.0) for x in (a, b))
    norm = max(float(a.norm()), float(b.norm()), floor)
    return _ratio(float((a - b).norm()), norm)


def _full_tensor(dump: Dump, records: Sequence[Record]) -> torch.Tensor | None:
    """Reassemble a tensor from its slices or summands; None if slices are unknown or the records' samples differ."""
    is_sum = any(record.is_share for record in records)
    if len({record.samples for record in records}) > 1 or (len(records) > 1 and records[0].cut is None and not is_sum):
        return None
    tensors = [dump.tensor(record) for record in records]
    if is_sum:
        return torch.stack(tensors).sum(0)
    shard_slice = records[0].cut
    if shard_slice is None:
        return tensors[0]
    if not num_missing(records):
        return torch.cat(tensors, dim=shard_slice.dim)
    full = tensors[0].new_zeros(full_shape(records[0]))
    for record, tensor in zip(records, tensors, strict=True):
        full.narrow(shard_slice.dim, record.cut.start if record.cut else 0, tensor.shape[shard_slice.dim]).copy_(tensor)
    return full


def worst_by_name(differences: Iterable[Difference], step: int, phase: str) -> dict[str, float]:
    """Find each name's largest error in a phase of a step, in execution order."""
    errors: dict[str, float] = {}
    for difference in differences:
        if difference.key.step == step and difference.phase == phase:
            errors[difference.key.name] = max(errors.get(difference.key.name, 0.0), difference.error)
    return errors

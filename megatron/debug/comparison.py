"""How far two dumps lie apart, tensor by tensor in the order of the run, and the first one beyond its tolerance."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron.debug.folder import GRADIENT, WEIGHT, Dump, Record
from megatron.debug.hooks import GRAD_INPUT, GRAD_OUTPUT, INPUT, OUTPUT
from megatron.debug.joining import Joined, Key, grouped, number_missing, paired, whole_shape
from megatron.debug.statistics import Statistics

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

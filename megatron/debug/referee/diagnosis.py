"""Compare one parameter's gradient shards with the unsharded gradient, and name the fault.

The hypotheses, in this order: no gradient, a value that is not finite, one factor on all ranks, one factor for each
rank, a sum or an average over an axis that was not computed, a part that counts twice, parts with other weights. They
are tested on the wrong rows or columns only, because a fused parameter may be wrong in one of its parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.debug.referee.dump_reader import Axes
from megatron.debug.referee.placement import Index, Shard, take

MAX_PARTS = 16
"""Largest number of ranks whose gradients are fitted to the unsharded gradient."""
MAX_RANGES = 3
FACTOR_FORMS = (
    (1.0, "x {}"),
    (-1.0, "/ {}"),
    (2.0, "x {} squared"),
    (-2.0, "/ {} squared"),
    (0.5, "x sqrt({})"),
    (-0.5, "/ sqrt({})"),
)
"""Power of an axis' size -> its text. Plain factors come first."""
FLOOR = 1e-3
"""Errors are relative to the norm of the gradient, or to this share of the norm of all gradients if that is larger."""


@dataclass(frozen=True)
class Fault:
    """A fault in a gradient, the loss or the gradient norm.

    Attributes:
        fault_type: ``none`` (no gradient), ``not finite``, ``not zero``, ``weights``, ``factor``, ``rank factors``,
            ``missing sum``, ``missing average``, ``counted twice``, ``weighted parts``, ``unknown``; for the loss also
            ``shift``, for the norm also ``shards left out`` and ``copies counted``
        text: one line for the reader
        factor: this layout / one process, where one factor explains the fault
        axis: the layout axis that the factor or the missing sum belongs to
    """

    fault_type: str
    text: str
    factor: float | None = None
    axis: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Result for one parameter. ``error`` is relative (see ``FLOOR``); ``fault`` is None if it is within bounds."""

    name: str
    norm: float
    error: float
    num_shards: int
    num_copies: int
    rows: str
    fault: Fault | None


@dataclass(frozen=True)
class _Part:
    """One rank's gradient in the wrong rows, and the expected values for the same elements."""

    rank: int
    index_key: tuple[bytes, ...]
    grad: Tensor
    expected: Tensor


class GradientJudge:
    """Compares parameter gradients.

    Args:
        axes_by_rank: rank -> its index on each axis
        rtol: largest relative error
        global_norm: norm of all unsharded gradients
    """

    def __init__(self, axes_by_rank: dict[int, Axes], rtol: float, global_norm: float) -> None:
        self.axes_by_rank = axes_by_rank
        self.rtol = rtol
        self.floor = FLOOR * global_norm
        first = next(iter(axes_by_rank.values()))
        self.sizes = {name: size for name, (_, size) in first.items() if size > 1}
        """Axis -> size, including ``micro``."""

    def compare(self, name: str, whole: Tensor | None, shards: Sequence[Shard]) -> Comparison:
        """Compare one parameter's shards with its unsharded gradient (fp64; None if there is none)."""
        keys = {_index_key(shard.index) for shard in shards}
        norm = 0.0 if whole is None else float(whole.norm())
        counts = (len(keys), len(shards) // max(len(keys), 1))
        fault = self._find_missing(whole, shards)
        if fault is not None or whole is None:
            return Comparison(name, norm, math.inf if fault else 0.0, *counts, "", fault)
        error = max(
            (
                float((shard.grad - take(whole, shard.index)).norm()) / self._scale(take(whole, shard.index))
                for shard in shards
                if shard.grad is not None
            ),
            default=0.0,
        )
        differing = sorted(shard.rank for shard in shards if shard.value_differs)
        if differing:
            text = f"the weights of {_ranks_text(differing)} differ from those of the other copies"
            return Comparison(name, norm, error, *counts, "", Fault("weights", text))
        if error <= self.rtol:
            return Comparison(name, norm, error, *counts, "", None)
        rows, parts = self._wrong_part(whole, shards)
        fault = self._diagnose(parts)
        if any(shard.is_partial for shard in shards):
            fault = Fault(
                fault.fault_type,
                f"the gradient is a DTensor with the placement Partial; {fault.text}",
                fault.factor,
                fault.axis,
            )
        return Comparison(name, norm, error, *counts, rows, fault)

    def _scale(self, expected: Tensor) -> float:
        """Return the norm by which errors are divided."""
        return max(float(expected.norm()), self.floor, 1e-300)

    def _find_missing(self, whole: Tensor | None, shards: Sequence[Shard]) -> Fault | None:
        """Find absent gradients and values that are not finite."""
        without = sorted(shard.rank for shard in shards if shard.grad is None)
        if whole is None:
            extra = sorted(shard.rank for shard in shards if shard.grad is not None and bool((shard.grad != 0).any()))
            return Fault("not zero", f"{_ranks_text(extra)} have a gradient, one process has none") if extra else None
        if without and bool((whole != 0).any()):
            where = (
                "no rank has a gradient" if len(without) == len(shards) else f"no gradient on {_ranks_text(without)}"
            )
            return Fault("none", where, 0.0 if len(without) == len(shards) else None)
        bad = sorted(shard.rank for shard in shards if shard.grad is not None and not bool(shard.grad.isfinite().all()))
        return Fault("not finite", f"NaN or infinity on {_ranks_text(bad)}") if bad else None

    def _wrong_part(self, whole: Tensor, shards: Sequence[Shard]) -> tuple[str, list[_Part]]:
        """Name the wrong rows or columns ("" for all of them), and select the gradients there."""
        best: tuple[float, int, Tensor] | None = None
        for dim in range(min(whole.ndim, 2)):
            wrong, active = self._wrong_slices(whole, shards, dim)
            share = float(wrong.sum()) / max(float(active.sum()), 1)
            if 0 < share < 1 and (best is None or share < best[0]):
                best = share, dim, wrong
        parts, rows = [], ""
        for shard in shards:
            if shard.grad is None:
                continue
            expected, grad = take(whole, shard.index), shard.grad
            if not bool(expected.any() | grad.any()):
                continue  # an empty shard, or rows of an embedding without a token: any factor would fit
            if best is not None:
                _, dim, wrong = best
                kept = wrong[shard.index[dim]].nonzero().flatten()
                if not len(kept):
                    continue
                expected, grad = expected.index_select(dim, kept), grad.index_select(dim, kept)
            parts.append(_Part(shard.rank, _index_key(shard.index), grad, expected))
        if best is not None:
            rows = _ranges_text(best[2], "row" if best[1] == 0 else "column")
        return rows, parts

    def _wrong_slices(self, whole: Tensor, shards: Sequence[Shard], dim: int) -> tuple[Tensor, Tensor]:
        """Return two masks of the slices along ``dim``.

        The first mask marks slices that are wrong on some rank. The second mask marks slices in which the expected
        gradient or the error is not negligible on some rank.
        """
        size = whole.shape[dim]
        typical = max(float(whole.norm()), self.floor) / math.sqrt(size)
        wrong, active = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
        for shard in shards:
            if shard.grad is not None:
                expected = _slice_norms(take(whole, shard.index), dim)
                errors = _slice_norms(shard.grad - take(whole, shard.index), dim)
                wrong[shard.index[dim]] |= errors > self.rtol * expected.clamp(min=typical)
                active[shard.index[dim]] |= (expected > self.rtol * typical) | (errors > self.rtol * typical)
        return wrong, active

    def _diagnose(self, parts: list[_Part]) -> Fault:
        """Find the first hypothesis that explains the wrong gradients."""
        grads, expected = torch.cat([p.grad.flatten() for p in parts]), torch.cat([p.expected.flatten() for p in parts])
        if float(expected.norm()) <= self.rtol * float(grads.norm()):
            return Fault("not zero", "one process has 0 here")
        right = sorted(part.rank for part in parts if self._fits(part.grad, part.expected))
        # If a copy is right, the copies are not parts of a sum.
        hypotheses = [self._common_factor, self._missing_sum, self._rank_factors, self._weighted_parts]
        for hypothesis in hypotheses[::2] if right else hypotheses:
            fault = hypothesis(parts)
            if fault is not None:
                return fault
        cosine = float(grads @ expected / (grads.norm() * expected.norm()).clamp(min=1e-300))
        ratio = float(grads.norm() / expected.norm())
        where = f", right on {_ranks_text(right)}" if right else ""
        return Fault("unknown", f"no factor explains it: norm x {ratio:.4g}, cosine {cosine:.4f}{where}")

    def _fits(self, actual: Tensor, expected: Tensor) -> bool:
        """Check if two tensors agree within ten times the bound."""
        return float((actual - expected).norm()) <= 10 * self.rtol * max(float(expected.norm()), 1e-300)

    def _common_factor(self, parts: list[_Part]) -> Fault | None:
        factors = [self._factor(part) for part in parts]
        known = [factor for factor in factors if factor is not None]
        if len(known) < len(parts) or max(known) - min(known) > 100 * self.rtol * max(abs(f) for f in known):
            return None
        factor = sum(known) / len(known)
        if all(part.grad.numel() < 2 for part in parts) and self.name_factor(factor)[1] is None:
            return None  # any number is a multiple of another
        text, axis = self.name_factor(factor)
        return Fault("factor", text, factor, axis)

    def _rank_factors(self, parts: list[_Part]) -> Fault | None:
        """Return the fault if each rank has its own multiple of the right gradient, otherwise None."""
        factors = [self._factor(part) for part in parts]
        if any(factor is None for factor in factors) or all(part.grad.numel() < 2 for part in parts):
            return None
        ranks_by_factor: dict[str, list[int]] = {}
        for part, factor in zip(parts, factors, strict=True):
            assert factor is not None
            key = (
                "right"
                if abs(factor - 1) < 100 * self.rtol
                else "zero"
                if abs(factor) < 100 * self.rtol
                else self.name_factor(factor)[0]
            )
            ranks_by_factor.setdefault(key, []).append(part.rank)
        return Fault(
            "rank factors", ", ".join(f"{key} on {_ranks_text(ranks)}" for key, ranks in ranks_by_factor.items())
        )

    def _factor(self, part: _Part) -> float | None:
        """Compute f with gradient = f x expected; None if there is none."""
        squared = float(part.expected.flatten() @ part.expected.flatten())
        if squared == 0:
            return None
        factor = float(part.grad.flatten() @ part.expected.flatten()) / squared
        return (
            factor
            if float((part.grad - factor * part.expected).norm()) <= 10 * self.rtol * math.sqrt(squared)
            else None
        )

    def name_factor(self, factor: float) -> tuple[str, str | None]:
        """Describe a factor, and find the axis (or product of axes) with this size."""
        tolerance = 100 * self.rtol
        if abs(factor) < tolerance:
            return "zero", None
        if abs(factor + 1) < tolerance:
            return "the sign is wrong (x -1)", None
        for power, form in FACTOR_FORMS:
            for names in _subsets(list(self.sizes)):
                size = math.prod(self.sizes[name] for name in names)
                if abs(factor / size**power - 1) >= tolerance:
                    continue
                axis = " x ".join(names)
                same = [
                    other for other in self.sizes if len(names) == 1 and other != axis and self.sizes[other] == size
                ]
                forms = " or ".join(form.format(name) for name in [axis, *same])
                twice = ": it counts twice" if size**power == 2 else ""
                return f"x {factor:.6g} ({forms}{twice})", " or ".join([axis, *same])
        return f"x {factor:.6g}" + (" (it counts twice)" if abs(factor / 2 - 1) < tolerance else ""), None

    def _groups(self, parts: list[_Part], names: Sequence[str]) -> Iterator[list[_Part]] | None:
        """Group the parts that differ only in their index on the axes ``names``; None if a group is incomplete.

        The parts in a group contain the same elements.
        """
        groups: dict[object, list[_Part]] = {}
        for part in parts:
            rest = tuple(idx for name, (idx, _) in self.axes_by_rank[part.rank].items() if name not in names)
            groups.setdefault((part.index_key, rest), []).append(part)
        size = math.prod(self.sizes[name] for name in names)
        return iter(groups.values()) if all(len(group) == size for group in groups.values()) else None

    def _missing_sum(self, parts: list[_Part]) -> Fault | None:
        """Return the fault if the sum over the copies on an axis is a multiple of the right gradient, else None."""
        for names in _subsets([name for name in self.sizes if name != "micro"]):
            groups = self._groups(parts, names)
            if groups is None:
                continue
            size, axis = math.prod(self.sizes[name] for name in names), " x ".join(names)
            factors: set[float | None] = set()
            for group in groups:
                total = torch.stack([part.grad for part in group]).sum(0)
                if all(self._fits(part.grad, group[0].grad) for part in group):
                    factors.add(None)  # equal copies: their sum says nothing
                    continue
                factor = self._factor(_Part(group[0].rank, (), total, group[0].expected))
                factors.add(None if factor is None else round(factor, 9))
            for form, fault_type, text in (
                (1.0, "missing sum", f"each rank has its own part only: the sum over {axis} is missing"),
                (
                    float(size),
                    "missing average",
                    f"each rank has its own part only: the average over {axis} is missing",
                ),
                (size + 1.0, "counted twice", f"the sum over {axis} is there, but each rank's own part counts twice"),
            ):
                if factors and all(
                    factor is not None and abs(factor / form - 1) < 100 * self.rtol for factor in factors
                ):
                    return Fault(fault_type, text, None, axis)
        return None

    def _weighted_parts(self, parts: list[_Part]) -> Fault | None:
        """Return the fault if the right gradient is a weighted sum of the copies on an axis, otherwise None."""
        for names in _subsets([name for name in self.sizes if name != "micro"]):
            groups = self._groups(parts, names)
            group = next(groups, None) if groups is not None else None
            if group is None or len(group) > MAX_PARTS or group[0].grad.numel() < 4 * len(group):
                continue
            matrix = torch.stack([part.grad.flatten() for part in group], dim=1)
            if int(torch.linalg.matrix_rank(matrix, rtol=10 * self.rtol)) < len(group):
                continue
            weights = torch.linalg.lstsq(matrix, group[0].expected.reshape(-1, 1)).solution
            if self._fits(matrix @ weights, group[0].expected.reshape(-1, 1)):
                terms = " + ".join(
                    f"{float(weight):.4g} x rank {part.rank}"
                    for weight, part in zip(weights.flatten(), group, strict=True)
                )
                axis = " x ".join(names)
                text = f"each rank has its own part over {axis}, with other weights (a mean of means?)"
                return Fault("weighted parts", f"{text}: one process = {terms}", None, axis)
        return None


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield single names, then pairs, and so on."""
    for count in range(1, len(names) + 1):
        yield from itertools.combinations(names, count)


def _index_key(index: Index) -> tuple[bytes, ...]:
    return tuple(positions.numpy().tobytes() for positions in index)


def _slice_norms(tensor: Tensor, dim: int) -> Tensor:
    """Compute each slice's norm along ``dim``."""
    slices = tensor.movedim(dim, 0)
    return slices.reshape(len(slices), math.prod(slices.shape[1:])).norm(dim=1)


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _ranges_text(mask: Tensor, noun: str) -> str:
    """Format a mask's positions as ranges ("rows 0-3, 8"), or as a count if there are many ranges."""
    positions = mask.nonzero().flatten().tolist()
    ranges: list[list[int]] = []
    for position in positions:
        if ranges and position == ranges[-1][1] + 1:
            ranges[-1][1] = position
        else:
            ranges.append([position, position])
    if len(ranges) > MAX_RANGES:
        return f"{len(positions)} of {len(mask)} {noun}s"
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return f"{noun}{'s' if len(positions) > 1 else ''} {text} of {len(mask)}"

"""Compare the loss and the gradient norm that the trainer reported, and name the fault."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.debug.referee.diagnosis import Fault, GradientJudge
from megatron.debug.referee.dump_reader import Dump
from megatron.debug.referee.placement import Shard

MAX_PATTERNS = 2
"""Largest number of groups of parameters that are tried together to explain a gradient norm."""


@dataclass(frozen=True)
class ScalarComparison:
    """``expected`` is the value in one process, ``actual`` the values on the ranks; both may be missing."""

    name: str
    expected: float | None
    actual: tuple[float, ...]
    note: str
    fault: Fault | None


def compare_loss(one: Dump, many: Dump, judge: GradientJudge) -> ScalarComparison:
    """Compare the loss. Ranks on the axes dp and cp may report the loss for their part of the batch."""
    expected = one.ranks[0].loss
    losses = {rank.rank: rank.loss for rank in many.ranks if rank.loss is not None}
    actual = tuple(losses.values())
    if expected is None or not losses:
        return ScalarComparison("loss", expected, actual, "not in the dumps", None)
    if not all(map(math.isfinite, (expected, *actual))):
        return ScalarComparison("loss", expected, actual, "", Fault("not finite", "NaN or infinity"))
    if all(_is_close(loss, expected, judge.rtol) for loss in actual):
        return ScalarComparison("loss", expected, actual, "", None)
    for axis in judge.sizes:
        if axis not in ("dp", "cp", "ranks", "micro") and _differs_along(axis, losses, judge):
            text = f"the ranks of {axis} compute different losses"
            return ScalarComparison("loss", expected, actual, "", Fault("unknown", text, None, axis))
    mean = sum(actual) / len(actual)
    if _is_close(mean, expected, judge.rtol):
        return ScalarComparison("loss", expected, actual, "the average over the ranks is that of one process", None)
    for axis, size in judge.sizes.items():
        if abs(mean - expected - math.log(size)) <= 10 * judge.rtol * max(abs(expected), 1):
            text = f"+ log({axis}): the softmax counts each logit {size} times"
            return ScalarComparison("loss", expected, actual, "", Fault("shift", text, None, axis))
    factor = mean / expected if expected else math.inf
    text, axis_name = judge.name_factor(factor)
    return ScalarComparison("loss", expected, actual, "", Fault("factor", text, factor, axis_name))


def _is_close(value: float, expected: float, rtol: float) -> bool:
    return abs(value - expected) <= rtol * max(abs(expected), 1e-300)


def _differs_along(axis: str, losses: Mapping[int, float], judge: GradientJudge) -> bool:
    """Check if ranks that differ only in their index on ``axis`` have different losses."""
    groups: dict[tuple[int, ...], list[float]] = {}
    for rank, loss in losses.items():
        rest = tuple(idx for name, (idx, _) in judge.axes_by_rank[rank].items() if name != axis)
        groups.setdefault(rest, []).append(loss)
    return any(not _is_close(loss, group[0], judge.rtol) for group in groups.values() for loss in group)


def compare_norm(
    one: Dump, many: Dump, grads: Mapping[str, Tensor], shards: Mapping[str, Sequence[Shard]], judge: GradientJudge
) -> ScalarComparison:
    """Compare the reported gradient norm with the norm of the dumped gradients.

    There is no fault if the reported norm is the norm of this layout's gradients, even if these gradients are wrong.
    """
    expected = math.sqrt(sum(float(grad.norm()) ** 2 for grad in grads.values()))
    norms = tuple(rank.norm for rank in many.ranks if rank.norm is not None)
    if not norms:
        return ScalarComparison("gradient norm", expected, norms, "not in the dumps", None)
    if not all(map(math.isfinite, norms)):
        return ScalarComparison("gradient norm", expected, norms, "", Fault("not finite", "NaN or infinity"))
    contributions = {name: _squares(name_shards) for name, name_shards in shards.items()}
    assembled = math.sqrt(sum(sum(squares) for squares in contributions.values()))
    reported = one.ranks[0].norm
    note = ""
    if reported is not None and not _is_close(reported, expected, 10 * judge.rtol):
        note = f"one process reports {reported:.10g}, which is not the norm of its gradients"
    bound = 10 * judge.rtol
    if all(_is_close(norm, expected, bound) for norm in norms):
        return ScalarComparison("gradient norm", expected, norms, note, None)
    if all(_is_close(norm, assembled, bound) for norm in norms):
        return ScalarComparison("gradient norm", expected, norms, "the norm of the gradients of this layout", None)
    if any(not _is_close(norm, norms[0], bound) for norm in norms):
        return ScalarComparison(
            "gradient norm", expected, norms, note, Fault("unknown", "the ranks report different norms")
        )
    explanations = sorted(_explain_norm(norms[0], assembled, contributions, shards, judge), key=lambda item: item[0])
    if explanations:
        miss, fault = explanations[0]
        equally_good = [other.text for other_miss, other in explanations[1:3] if other_miss <= 2 * miss + 1e-12]
        text = " or ".join([fault.text, *equally_good])
        return ScalarComparison(
            "gradient norm", expected, norms, note, Fault(fault.fault_type, text, norms[0] / assembled)
        )
    text, axis = judge.name_factor(norms[0] / assembled)
    return ScalarComparison("gradient norm", expected, norms, note, Fault("factor", text, norms[0] / assembled, axis))


def _squares(shards: Sequence[Shard]) -> list[float]:
    """Compute each distinct shard's squared norm, the lowest rank's shard first."""
    squares: dict[tuple[bytes, ...], float] = {}
    for shard in shards:
        key = tuple(positions.numpy().tobytes() for positions in shard.index)
        if shard.grad is not None and key not in squares:
            squares[key] = float(shard.grad.norm()) ** 2
    return list(squares.values())


def _explain_norm(
    norm: float,
    assembled: float,
    contributions: Mapping[str, Sequence[float]],
    shards: Mapping[str, Sequence[Shard]],
    judge: GradientJudge,
) -> Iterator[tuple[float, Fault]]:
    """Yield (fit, fault) for each explanation within bounds.

    An explanation is a parameter group (the same name up to layer numbers) that counts too little or too often.
    """
    patterns: dict[str, list[str]] = {}
    for name in contributions:
        patterns.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    changes: list[tuple[str, str, float]] = []  # type of fault, text, change of the squared norm
    for pattern, names in patterns.items():
        sharded = [name for name in names if len(contributions[name]) > 1]
        left_out = sum(sum(contributions[name][1:]) for name in sharded)
        total = sum(sum(contributions[name]) for name in names)
        if sharded and left_out:
            changes.append(("shards left out", f"only the first shard of {pattern} counts", -left_out))
        if total:
            changes.append(("shards left out", f"{pattern} is left out", -total))
            changes += [
                ("copies counted", f"{pattern} counts {size} times (once for each rank of {axis})", (size - 1) * total)
                for axis, size in judge.sizes.items()
                if axis != "micro" and all(len(shards[name]) >= size * len(contributions[name]) for name in names)
            ]
    copied = [name for name in contributions if len(contributions[name]) == 1 and len(shards[name]) > 1]
    total = sum(sum(contributions[name]) for name in copied)
    changes += [
        (
            "copies counted",
            f"all parameters without shards count {size} times (once for each rank of {axis})",
            (size - 1) * total,
        )
        for axis, size in judge.sizes.items()
        if axis != "micro" and len(copied) > 1
    ]
    bound = 20 * judge.rtol * norm**2
    # A single explanation that fits makes pairs superfluous.
    for count in range(1, MAX_PATTERNS + 1):
        found = False
        for combination in itertools.combinations(changes, count):
            change = sum(item[2] for item in combination)
            miss = abs(assembled**2 + change - norm**2)
            if miss <= bound and abs(change) > bound:
                found = True
                yield miss / norm**2, Fault(combination[0][0], " and ".join(item[1] for item in combination))
        if found:
            return

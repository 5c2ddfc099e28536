"""Compare two dumps: one process and a parallel layout at the same step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.debug.referee.diagnosis import Comparison, GradientJudge
from megatron.debug.referee.dump_reader import BadDumpError, Dump
from megatron.debug.referee.placement import place_shards
from megatron.debug.referee.scalars import ScalarComparison, compare_loss, compare_norm

RTOL = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Bounds by the coarsest format of gradients; 1e-6 because many trainers compute norms and losses in fp32."""
MAX_NAMES = 6


@dataclass(frozen=True)
class Verdict:
    """Comparison of a step.

    Attributes:
        gradients: all parameters, in forward order if the one-process dump contains it, otherwise in model order
        renamed: parameters with another name in the layout, as (rank, name, name in one process)
    """

    rtol: float
    gradients: tuple[Comparison, ...]
    loss: ScalarComparison
    norm: ScalarComparison
    renamed: tuple[tuple[int, str, str], ...]

    @property
    def wrong(self) -> list[Comparison]:
        """Wrong gradients in forward order."""
        return [comparison for comparison in self.gradients if comparison.fault is not None]

    @property
    def is_equal(self) -> bool:
        return not self.wrong and self.loss.fault is None and self.norm.fault is None


def judge_step(one: Dump, many: Dump, rtol: float | None = None) -> Verdict:
    """Compare a layout's step with one process's step from the same weights.

    Raises:
        BadDumpError: If ``one`` has several ranks, no gradient, other weights or other parameters.
    """
    if len(one.ranks) != 1:
        raise BadDumpError(f"{one.folder} has {len(one.ranks)} ranks. The first dump must be of one process")
    parameters = {parameter.name: parameter for parameter in one.ranks[0].parameters}
    values = {name: parameter.value for name, parameter in parameters.items()}
    placements = place_shards(values, many)
    if placements.unplaced:
        raise BadDumpError(_explain_unplaced(values, placements.unplaced, one, many))
    absent = [name for name, shards in placements.shards.items() if not shards]
    if absent:
        raise BadDumpError(f"no rank of {many.folder} has {_names_text(absent)}")
    for name, shards in placements.shards.items():
        covered = torch.zeros(values[name].shape, dtype=torch.bool)
        for shard in shards:
            covered[torch.meshgrid(*shard.index, indexing="ij") if shard.index else ()] = True
        if not bool(covered.all()):
            raise BadDumpError(
                f"the shards of {name} in {many.folder} are {int(covered.sum())} of {covered.numel()} elements"
            )
    grads: dict[str, Tensor] = {
        name: parameter.grad.double() for name, parameter in parameters.items() if parameter.grad is not None
    }
    if not grads:
        raise BadDumpError(f"{one.folder} has no gradients. Call the hook after backward and before zero_grad")
    if not all(bool(grad.isfinite().all()) for grad in grads.values()):
        raise BadDumpError(f"{one.folder} has gradients that are not finite")
    if rtol is None:
        rtol = max(RTOL.get(dtype, RTOL[torch.bfloat16]) for dtype in one.dtypes | many.dtypes)
    global_norm = math.sqrt(sum(float(grad.norm()) ** 2 for grad in grads.values()))
    judge = GradientJudge({rank.rank: rank.axes for rank in many.ranks}, rtol, global_norm)
    names = forward_order(list(parameters), one.ranks[0].calls)
    gradients = tuple(judge.compare(name, grads.get(name), placements.shards[name]) for name in names)
    renamed = tuple(
        (shard.rank, shard.local_name, name)
        for name, shards in placements.shards.items()
        for shard in shards
        if shard.local_name != name
    )
    loss, norm = compare_loss(one, many, judge), compare_norm(one, many, grads, placements.shards, judge)
    return Verdict(rtol, gradients, loss, norm, renamed)


def forward_order(names: list[str], calls: tuple[str, ...]) -> list[str]:
    """Sort parameters by the first call of their module, or of the nearest enclosing module that was called."""
    call_idx = {name: idx for idx, name in enumerate(calls)}

    def first_call(name: str) -> int:
        while name:
            name = name.rpartition(".")[0]
            if name in call_idx:
                return call_idx[name]
        return -1

    return sorted(names, key=first_call)


def _explain_unplaced(values: dict[str, Tensor], unplaced: list[tuple[int, str]], one: Dump, many: Dump) -> str:
    """Explain why parameters of the layout do not match the one-process run: other names, or other values."""
    unknown = list(dict.fromkeys(name for _, name in unplaced if name not in values))
    if unknown:
        known = {parameter.name for rank in many.ranks for parameter in rank.parameters}
        only_one = [name for name in values if name not in known]
        return (
            f"only {many.folder} has {_names_text(unknown)}, only {one.folder} has {_names_text(only_one)}. "
            "If only the names differ, use --rename"
        )
    names = list(dict.fromkeys(name for _, name in unplaced))
    rank, name = unplaced[0]
    local = next(parameter for parameter in many.ranks[rank].parameters if parameter.name == name)
    shapes = f"{list(local.value.shape)} on rank {rank}, {list(values[name].shape)} in one process"
    return (
        f"the weights of {_names_text(names)} are not those of {one.folder} ({name}: {shapes}). Start both runs from "
        "the same weights, and call the hook before the optimizer step"
    )


def _names_text(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return (", ".join(names[:MAX_NAMES]) or "nothing else") + more

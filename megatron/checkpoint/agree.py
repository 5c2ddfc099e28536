"""One verdict for all ranks: each does its share, rank 0 judges, and an error anywhere is an error everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.checkpoint.causes import cause
from megatron.errors import CheckpointError
from megatron.mpu.groups import Group

Share = TypeVar("Share")
Verdict = TypeVar("Verdict")


def together(world: Group, local: Callable[[], Share], judge: Callable[[list[Share]], Verdict]) -> Verdict:
    """Return ``judge(shares)`` of rank 0 on every rank, ``shares`` being what ``local()`` gave on each. Collective.

    Raises:
        CheckpointError: on all ranks alike, when ``local`` failed on any rank or ``judge`` on rank 0; the ranks and
            their causes are named, and on the culprit the cause is chained.
    """
    share: Any = None
    failure: Exception | None = None
    try:
        share = local()
    except Exception as error:  # told to all ranks below: one that left here would let the others wait
        failure = error
    told = _gather(world, (share, cause(failure) if failure else None))
    verdict: Any = None
    problem: CheckpointError | None = None
    if world.rank == 0:
        try:
            verdict = judge(_shares(told))
        except Exception as error:
            failure = failure or error
            problem = error if isinstance(error, CheckpointError) else CheckpointError(cause(error))
            problem.is_of_this_rank = False  # it names its ranks, and goes to all
    verdict, problem = world.broadcast_object((verdict, problem))
    if problem:
        raise problem from (failure if failure is not problem else None)
    return verdict


def _shares(told: list[tuple[Any, str | None]]) -> list[Any]:
    problems = [f"rank {rank}: {cause}" for rank, (_, cause) in enumerate(told) if cause]
    if problems:
        raise CheckpointError("; ".join(problems))
    return [share for share, _ in told]


def _gather(world: Group, value: Any) -> list[Any]:
    """Return the values of all ranks in rank order on rank 0, nothing elsewhere."""
    if world.size == 1:
        return [value]
    values: list[Any] | None = [None] * world.size if world.rank == 0 else None
    dist.gather_object(value, values, dst=world.ranks[0], group=world.handle)
    return values or []

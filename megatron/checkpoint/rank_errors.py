"""An error on one rank is an error on all; causes in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.errors import CheckpointError, marked
from megatron.mpu.groups import Group

# What ranks failed at, in words that can travel from one to the other.


def cause(error: BaseException) -> str:
    """Return what went wrong in one line."""
    return str(error) if isinstance(error, CheckpointError | OSError) else f"{type(error).__name__}: {error}"


@contextmanager
def in_words(*, is_of_this_rank: bool = True) -> Iterator[None]:
    """Raise what goes wrong within as a CheckpointError: other exceptions may not survive the way to another rank."""
    with marked(is_of_this_rank=is_of_this_rank):
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(cause(error)).with_traceback(error.__traceback__) from error


def summary(failures: Mapping[int, tuple[BaseException, Any]], num_ranks: int) -> str:
    """Return the causes with their ranks; ranks that failed alike are named together.

    Args:
        failures: what each rank failed at, as ``torch.distributed.checkpoint`` gathers it.
    """
    ranks: dict[tuple[str, bool], list[int]] = {}
    for rank, (error, _) in sorted(failures.items()):
        ranks.setdefault((cause(error), getattr(error, "is_of_this_rank", True)), []).append(rank)
    return "; ".join(
        f"{_whose(own)}{text}" if is_of_a_rank and len(own) < num_ranks else text
        for (text, is_of_a_rank), own in ranks.items()
    )


def _whose(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: "


# One verdict for all ranks: each does its share, rank 0 judges, and an error anywhere is an error everywhere.

Share = TypeVar("Share")
Verdict = TypeVar("Verdict")


def gather_verdict(world: Group, local: Callable[[], Share], judge: Callable[[list[Share]], Verdict]) -> Verdict:
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
    gathered = _gather(world, (share, cause(failure) if failure else None))
    verdict: Any = None
    problem: CheckpointError | None = None
    if world.rank == 0:
        try:
            verdict = judge(_shares(gathered))
        except Exception as error:
            failure = failure or error
            problem = error if isinstance(error, CheckpointError) else CheckpointError(cause(error))
            problem.is_of_this_rank = False  # it names its ranks, and goes to all
    verdict, problem = world.broadcast_object((verdict, problem))
    if problem:
        raise problem from (failure if failure is not problem else None)
    return verdict


def _shares(answers: list[tuple[Any, str | None]]) -> list[Any]:
    problems = [f"rank {rank}: {cause}" for rank, (_, cause) in enumerate(answers) if cause]
    if problems:
        raise CheckpointError("; ".join(problems))
    return [share for share, _ in answers]


def _gather(world: Group, value: Any) -> list[Any]:
    """Return the values of all ranks in rank order on rank 0, nothing elsewhere."""
    if world.size == 1:
        return [value]
    values: list[Any] | None = [None] * world.size if world.rank == 0 else None
    dist.gather_object(value, values, dst=world.ranks[0], group=world.handle)
    return values or []

"""Propagate an error on one rank to all ranks, with its cause as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.errors import CheckpointError, marked
from megatron.mpu.groups import Group

# Failure causes as text, which can be sent from one rank to another.


def error_text(error: BaseException) -> str:
    """Describe the cause of ``error``."""
    return str(error) if isinstance(error, CheckpointError | OSError) else f"{type(error).__name__}: {error}"


@contextmanager
def as_checkpoint_error(*, is_of_this_rank: bool = True) -> Iterator[None]:
    """Convert exceptions raised in the block to CheckpointError, because other types may fail to pickle.

    Args:
        is_of_this_rank: the error concerns this rank only, so messages to all ranks name the rank.
    """
    with marked(is_of_this_rank=is_of_this_rank):
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(error_text(error)).with_traceback(error.__traceback__) from error


def summarize_failures(failures: Mapping[int, tuple[BaseException, Any]], num_ranks: int) -> str:
    """List each cause once, with the ranks that failed for it.

    Args:
        failures: rank -> (error, traceback), as ``torch.distributed.checkpoint`` gathers them.
    """
    ranks: dict[tuple[str, bool], list[int]] = {}
    for rank, (error, _) in sorted(failures.items()):
        ranks.setdefault((error_text(error), getattr(error, "is_of_this_rank", True)), []).append(rank)
    return "; ".join(
        f"{_rank_prefix(failed_ranks)}{text}" if is_of_a_rank and len(failed_ranks) < num_ranks else text
        for (text, is_of_a_rank), failed_ranks in ranks.items()
    )


def _rank_prefix(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: "


# Joint decisions: each rank computes its share, rank 0 decides, and an error on any rank is raised on all ranks.

Share = TypeVar("Share")
Verdict = TypeVar("Verdict")


def gather_verdict(
    world: Group, compute_share: Callable[[], Share], judge: Callable[[list[Share]], Verdict]
) -> Verdict:
    """Return rank 0's ``judge(shares)`` on every rank. Collective.

    Args:
        compute_share: computes this rank's share.
        judge: called on rank 0 with all ranks' shares, in rank order.

    Raises:
        CheckpointError: ``compute_share`` failed on any rank, or ``judge`` failed on rank 0. It is raised on all ranks,
            names the ranks that failed and their causes, and is chained to the original exception on the failing rank.
    """
    share: Any = None
    failure: Exception | None = None
    try:
        share = compute_share()
    except Exception as error:  # sent to all ranks below; raising here would leave the others waiting in the gather
        failure = error
    gathered = _gather(world, (share, error_text(failure) if failure else None))
    verdict: Any = None
    problem: CheckpointError | None = None
    if world.rank == 0:
        try:
            verdict = judge(_require_shares(gathered))
        except Exception as error:
            failure = failure or error
            problem = error if isinstance(error, CheckpointError) else CheckpointError(error_text(error))
            problem.is_of_this_rank = False  # its text names the ranks, and it is raised on all of them
    verdict, problem = world.broadcast_object((verdict, problem))
    if problem:
        raise problem from (failure if failure is not problem else None)
    return verdict


def _require_shares(gathered: list[tuple[Any, str | None]]) -> list[Any]:
    problems = [f"rank {rank}: {cause}" for rank, (_, cause) in enumerate(gathered) if cause]
    if problems:
        raise CheckpointError("; ".join(problems))
    return [share for share, _ in gathered]


def _gather(world: Group, value: Any) -> list[Any]:
    """Gather all ranks' values in rank order on rank 0; other ranks receive an empty list."""
    if world.size == 1:
        return [value]
    values: list[Any] | None = [None] * world.size if world.rank == 0 else None
    dist.gather_object(value, values, dst=world.ranks[0], group=world.handle)
    return values or []

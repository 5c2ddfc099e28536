"""What ranks failed at, in words that can travel from one to the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron.errors import CheckpointError, marked


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

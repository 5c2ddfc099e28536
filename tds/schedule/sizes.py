"""What every order of work asks of its arguments."""

from __future__ import annotations

from collections.abc import Callable

from tds.schedule.actions import Action

Order = Callable[[int, int, int], list[Action]]
"""A function of (number of stages, number of micro-batches, stage) to what the stage does."""


def check_sizes(num_stages: int, num_micro_batches: int, stage: int, num_chunks: int = 1) -> None:
    """Raise ValueError unless there is such a stage with work to do."""
    if num_stages < 1 or num_micro_batches < 1 or not 0 <= stage < num_stages:
        raise ValueError(
            f"a schedule needs num_stages >= 1, num_micro_batches >= 1 and 0 <= stage < num_stages, got "
            f"num_stages={num_stages}, num_micro_batches={num_micro_batches}, stage={stage}"
        )
    if num_chunks < 1 or (num_chunks > 1 and num_stages == 1):
        raise ValueError(
            f"a schedule needs num_chunks >= 1, and num_stages >= 2 for more than one chunk, got "
            f"num_chunks={num_chunks}, num_stages={num_stages}. Lower chunks= of the module, or add stages."
        )

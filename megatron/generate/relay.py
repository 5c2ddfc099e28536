"""Through the stages of a pipeline: hidden states from one to the next, and what the last one chose to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

import torch
import torch.distributed as dist

from megatron.generate.part import Part

Apply = Callable[[int, torch.Tensor | None], torch.Tensor]


def relay(
    part: Part,
    units: range,
    apply: Apply,
    shape: tuple[int, ...],
    x: torch.Tensor | None = None,
    *,
    held_by: int | None = None,
) -> torch.Tensor | None:
    """Return what ``units`` make of ``x`` on the stage of the last of them, None elsewhere. Collective over the pipe.

    Args:
        apply: from (number of a unit of this rank, what the unit before returned) to what the unit returns.
        shape: of ``x``, and of all that crosses from stage to stage.
        x: what the first unit takes.
        held_by: the stage that has it; None where the first unit takes nothing.
    """
    before = held_by
    for stage, run in _runs(part, units):
        if before is not None and before != stage:
            x = _hand_over(part, x, shape, before, stage)
        if part.pipe.rank == stage:
            for number in run:
                x = apply(number, x)
        before = stage
    return x if part.pipe.rank == before else None


def _runs(part: Part, units: range) -> Iterator[tuple[int, list[int]]]:
    """Yield (stage, numbers) of neighbouring units that lie on one stage."""
    for stage, numbers in groupby(units, lambda number: part.stages[number]):
        yield stage, list(numbers)


def _hand_over(
    part: Part, x: torch.Tensor | None, shape: tuple[int, ...], source: int, target: int
) -> torch.Tensor | None:
    pipe = part.pipe
    if pipe.rank == source:
        assert x is not None
        dist.send(x.contiguous(), pipe.ranks[target], group=pipe.handle)
    elif pipe.rank == target:
        x = torch.empty(shape, dtype=part.dtype, device=part.device)
        dist.recv(x, pipe.ranks[source], group=pipe.handle)
        return x
    return None


def to_all_stages(part: Part, x: torch.Tensor | None, shape: tuple[int, ...], stage: int) -> torch.Tensor:
    """Return the ``x`` of ``stage`` on every stage. Collective over the pipe."""
    if x is None or part.pipe.rank != stage:
        x = torch.empty(shape, dtype=part.dtype, device=part.device)
    if part.pipe.size > 1:
        dist.broadcast(x.contiguous(), part.pipe.ranks[stage], group=part.pipe.handle)
    return x


def tokens_to_all_stages(part: Part, tokens: torch.Tensor | None, size: int) -> torch.Tensor:
    """Return the last stage's ``tokens`` [size] on every stage. Collective over the pipe."""
    if tokens is None:
        tokens = torch.empty(size, dtype=torch.long, device=part.device)
    if part.pipe.size > 1:
        dist.broadcast(tokens, part.pipe.ranks[part.stages[-1]], group=part.pipe.handle)
    return tokens

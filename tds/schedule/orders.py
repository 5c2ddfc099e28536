"""The orders of work, each a function of (stages, micro-batches, stage) to a list of actions.

| name | in flight on stage i of p | idle time of a stage |
|---|---|---|
| gpipe | m | (p-1)(F+B+W) |
| 1f1b | min(p-i, m) | (p-1)(F+B+W) |
| zb-h1 | min(p, m) | (p-1)(F+B-W) |
| interleaved, c chunks | 2(p-i-1) + (c-1)p + 1 chunks of 1/c | (p-1)(F+B+W)/c if p divides m |
| zb-h1, c chunks | i more than interleaved | (p-1)(F+B-W)/c if p divides m |

F, B and W are the times of a forward, a backward for the input and one for the weights. All add up the gradients of
each weight by rising micro-batch: the results are the same to the bit. Sources are in the files of the orders.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tds.schedule.actions import Action, Forward
from tds.schedule.interleaved import in_rounds, interleaved
from tds.schedule.one_chunk import gpipe, one_forward_one_backward
from tds.schedule.sizes import Order, check_sizes
from tds.schedule.zero_bubble import zero_bubble_h1


def forward_only(num_stages: int, num_micro_batches: int, stage: int, num_chunks: int = 1) -> list[Action]:
    """Return the order of an evaluation: every forward, with chunks in rounds of ``num_stages`` micro-batches."""
    check_sizes(num_stages, num_micro_batches, stage, num_chunks)
    if num_chunks == 1:
        return [Forward(i) for i in range(num_micro_batches)]
    return [Forward(*place) for place in in_rounds(num_stages, num_micro_batches, num_chunks)]


ONE_CHUNK: dict[str, Order] = {"1f1b": one_forward_one_backward, "gpipe": gpipe, "zb-h1": zero_bubble_h1}
MANY_CHUNKS: dict[str, Callable[..., list[Action]]] = {"interleaved": interleaved, "zb-h1": zero_bubble_h1}
"""Orders for several chunks of layers on each stage; they take the number of chunks as a last argument."""

SCHEDULE_NAMES = tuple(dict.fromkeys((*ONE_CHUNK, *MANY_CHUNKS)))


def schedule_named(name: object, num_chunks: int = 1) -> Order:
    """Return the training order that the JSON's ``"pipeline": {"schedule": name}`` asks for.

    Raises:
        ValueError: no such order, or none for so many chunks of layers on each stage.
    """
    key = name.lower() if isinstance(name, str) else name
    if key not in SCHEDULE_NAMES:
        raise ValueError(f'"pipeline": {{"schedule": ...}} must be one of {sorted(SCHEDULE_NAMES)}, got {name!r}')
    if num_chunks == 1 and key not in ONE_CHUNK:
        raise ValueError(
            f'"pipeline": {{"schedule": {name!r}}} needs 2 or more chunks of layers on each stage, got 1. '
            "Build the model with tds.PipelineModule(..., chunks=2), or choose another schedule."
        )
    if num_chunks != 1 and key not in MANY_CHUNKS:
        raise ValueError(
            f'"pipeline": {{"schedule": {name!r}}} needs one chunk of layers on each stage, got {num_chunks}. '
            f"Build the model without chunks=, or choose one of {sorted(MANY_CHUNKS)}."
        )
    return ONE_CHUNK[key] if num_chunks == 1 else _of_chunks(key, num_chunks)  # type: ignore[index, arg-type]


@functools.cache
def _of_chunks(name: str, num_chunks: int) -> Order:
    """Return the very same function each time, so that what is known of it can be kept by it."""
    return functools.partial(MANY_CHUNKS[name], num_chunks=num_chunks)

"""The orders of work, each a function of (stages, micro-batches, stage) to a list of actions.

| name | in flight on stage i of p | idle time of a stage |
|---|---|---|
| gpipe | m | (p-1)(F+B+W) |
| 1f1b | min(p-i, m) | (p-1)(F+B+W) |
| zb-h1 | min(p, m) | (p-1)(F+B-W) |
| interleaved, c chunks | 2(p-i-1) + (c-1)p + 1 chunks of 1/c | (p-1)(F+B+W)/c if p divides m |

F, B and W are the times of a forward, a backward for the input and one for the weights. All add up the gradients of
each weight by rising micro-batch: the results are the same to the bit. Sources: Huang et al. 2019, "GPipe"; Narayanan
et al. 2019, "PipeDream", section 3.2; for the other two see their files.
"""

from __future__ import annotations

import functools

from tds.schedule.actions import Action, Backward, Forward
from tds.schedule.interleaved import in_rounds, interleaved
from tds.schedule.sizes import Order, check_sizes
from tds.schedule.zero_bubble import zero_bubble_h1


def forward_only(num_stages: int, num_micro_batches: int, stage: int, num_chunks: int = 1) -> list[Action]:
    """Return the order of an evaluation: every forward, with chunks in rounds of ``num_stages`` micro-batches."""
    check_sizes(num_stages, num_micro_batches, stage, num_chunks)
    if num_chunks == 1:
        return [Forward(i) for i in range(num_micro_batches)]
    return [Forward(*place) for place in in_rounds(num_stages, num_micro_batches, num_chunks)]


def gpipe(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
    """Return all forwards, then all backwards."""
    check_sizes(num_stages, num_micro_batches, stage)
    return [*map(Forward, range(num_micro_batches)), *map(Backward, range(num_micro_batches))]


def one_forward_one_backward(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
    """Return a warm-up of forwards, then forward and backward in turn, then the backwards that are left."""
    check_sizes(num_stages, num_micro_batches, stage)
    warm_up = min(num_stages - stage - 1, num_micro_batches)
    actions: list[Action] = [Forward(i) for i in range(warm_up)]
    for i in range(num_micro_batches - warm_up):
        actions += [Forward(warm_up + i), Backward(i)]
    actions += [Backward(i) for i in range(num_micro_batches - warm_up, num_micro_batches)]
    return actions


TRAINING_ORDERS: dict[str, Order] = {"1f1b": one_forward_one_backward, "gpipe": gpipe, "zb-h1": zero_bubble_h1}
"""For one chunk of layers on each stage."""

SCHEDULE_NAMES = (*TRAINING_ORDERS, "interleaved")


def schedule_named(name: object, num_chunks: int = 1) -> Order:
    """Return the training order that the JSON's ``"pipeline": {"schedule": name}`` asks for.

    Raises:
        ValueError: no such order, or none for so many chunks of layers on each stage.
    """
    key = name.lower() if isinstance(name, str) else name
    if key not in SCHEDULE_NAMES:
        raise ValueError(f'"pipeline": {{"schedule": ...}} must be one of {sorted(SCHEDULE_NAMES)}, got {name!r}')
    if key == "interleaved" and num_chunks < 2:
        raise ValueError(
            f'"pipeline": {{"schedule": "interleaved"}} needs 2 or more chunks of layers on each stage, got '
            f"{num_chunks}. Build the model with tds.PipelineModule(..., chunks=2), or choose another schedule."
        )
    if key != "interleaved" and num_chunks != 1:
        raise ValueError(
            f'"pipeline": {{"schedule": {name!r}}} needs one chunk of layers on each stage, got {num_chunks}. '
            'Build the model without chunks=, or choose "interleaved".'
        )
    return _interleaved(num_chunks) if key == "interleaved" else TRAINING_ORDERS[key]  # type: ignore[index]


@functools.cache
def _interleaved(num_chunks: int) -> Order:
    """Return the very same function each time, so that what is known of it can be kept by it."""
    return functools.partial(interleaved, num_chunks=num_chunks)

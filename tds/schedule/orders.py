"""The orders of work, each a function of (stages, micro-batches, stage) to a list of actions.

| name | activations in flight on stage i of p | idle time |
|---|---|---|
| gpipe | m | (p-1)(F+B) |
| 1f1b | min(p-i, m) | (p-1)(F+B) |

All run the backwards in the order of the micro-batches, so they add up gradients in the same order: the results are
the same to the bit. Sources: Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream", section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable

from tds.schedule.actions import Action, Backward, Forward

Order = Callable[[int, int, int], list[Action]]


def forward_only(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
    """Return the order of an evaluation: every forward."""
    _check(num_stages, num_micro_batches, stage)
    return [Forward(i) for i in range(num_micro_batches)]


def gpipe(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
    """Return all forwards, then all backwards."""
    _check(num_stages, num_micro_batches, stage)
    return [*map(Forward, range(num_micro_batches)), *map(Backward, range(num_micro_batches))]


def one_forward_one_backward(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
    """Return a warm-up of forwards, then forward and backward in turn, then the backwards that are left."""
    _check(num_stages, num_micro_batches, stage)
    warm_up = min(num_stages - stage - 1, num_micro_batches)
    actions: list[Action] = [Forward(i) for i in range(warm_up)]
    for i in range(num_micro_batches - warm_up):
        actions += [Forward(warm_up + i), Backward(i)]
    actions += [Backward(i) for i in range(num_micro_batches - warm_up, num_micro_batches)]
    return actions


TRAINING_ORDERS: dict[str, Order] = {"1f1b": one_forward_one_backward, "gpipe": gpipe}


def schedule_named(name: object) -> Order:
    """Return the training order that the JSON's ``"pipeline": {"schedule": name}`` asks for.

    Raises:
        ValueError: no such order.
    """
    key = name.lower() if isinstance(name, str) else name
    if key not in TRAINING_ORDERS:
        raise ValueError(f'"pipeline": {{"schedule": ...}} must be one of {sorted(TRAINING_ORDERS)}, got {name!r}')
    return TRAINING_ORDERS[key]  # type: ignore[index]


def _check(num_stages: int, num_micro_batches: int, stage: int) -> None:
    if num_stages < 1 or num_micro_batches < 1 or not 0 <= stage < num_stages:
        raise ValueError(
            f"a schedule needs num_stages >= 1, num_micro_batches >= 1 and 0 <= stage < num_stages, got "
            f"num_stages={num_stages}, num_micro_batches={num_micro_batches}, stage={stage}"
        )

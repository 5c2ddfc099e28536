"""Which actions a stage runs: by the name of a schedule, a user's own order, or what "auto" settles on."""

from __future__ import annotations

import functools
from typing import Any

from tds.schedule import Action, ScheduleError, forward_only, schedule_named, validate
from tds.schedule.orders import Order
from tds.window import send_window

BY_DEFAULT = {False: "1f1b", True: "interleaved"}


class Plan:
    """The orders of one stage.

    Args:
        schedule: a name, or a function of (stages, micro-batches, stage) to a list of actions; None: 1f1b, or
            interleaved where a stage has several chunks.

    Raises:
        ValueError: no such name, or it does not go with ``num_chunks``.
    """

    def __init__(self, schedule: Any, *, num_stages: int, num_chunks: int, stage: int) -> None:
        self.num_stages, self.num_chunks, self.stage = num_stages, num_chunks, stage
        self.set(BY_DEFAULT[num_chunks > 1] if schedule is None else schedule)

    def set(self, schedule: Any) -> None:
        """Run ``schedule`` from the next call on."""
        self.order: Order = schedule if callable(schedule) else schedule_named(schedule, self.num_chunks)
        self.name = schedule if isinstance(schedule, str) else getattr(schedule, "__name__", type(schedule).__name__)
        self._is_built_in = not callable(schedule)
        self._actions: dict[int, list[Action]] = {}
        self._windows: dict[tuple[int, bool], int] = {}

    def training(self, num_micro_batches: int) -> list[Action]:
        """Return the actions of a train_batch; a user's own order is proven to run first."""
        if num_micro_batches not in self._actions:
            self._prove(num_micro_batches)
            self._actions[num_micro_batches] = self.order(self.num_stages, num_micro_batches, self.stage)
        return self._actions[num_micro_batches]

    def _prove(self, num_micro_batches: int) -> None:
        if not self._is_built_in and num_micro_batches not in self._actions:
            prove(self.order, self.name, self.num_stages, num_micro_batches, self.num_chunks)

    def evaluation(self, num_micro_batches: int) -> list[Action]:
        """Return the actions of an eval_batch."""
        return _forwards(self.num_chunks)(self.num_stages, num_micro_batches, self.stage)

    def window(self, num_micro_batches: int, *, is_training: bool = True) -> int:
        """Return how many messages of a kind may wait for a neighbour to take them."""
        key = num_micro_batches, is_training
        if key not in self._windows:
            if is_training:
                self._prove(num_micro_batches)
            order = self.order if is_training else _forwards(self.num_chunks)
            self._windows[key] = send_window(order, self.num_stages, num_micro_batches, self.num_chunks, is_training)
        return self._windows[key]


@functools.lru_cache
def _forwards(num_chunks: int) -> Order:
    return forward_only if num_chunks == 1 else functools.partial(forward_only, num_chunks=num_chunks)


def prove(order: Order, name: str, num_stages: int, num_micro_batches: int, num_chunks: int) -> None:
    """Raise ScheduleError, with the name of a user's ``order``, unless it trains what it must and cannot stop."""
    try:
        every = [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]
        validate(every, num_micro_batches, num_chunks=num_chunks)
    except ScheduleError as error:
        raise ScheduleError(f"the schedule {name} cannot run: {error}") from error

"""SchedulePlan: a stage's actions, from a named schedule or a user's function."""

from __future__ import annotations

import functools
from typing import Any

from tds.schedule import (
    Action,
    Order,
    Placement,
    ScheduleError,
    forward_only,
    schedule_named,
    validate,
)
from tds.schedule.limits import Posts, receive_posts, send_window
from tds.schedule.simulate import default_schedule


class SchedulePlan:
    """One stage's action lists, for training and evaluation.

    Args:
        schedule: a name, or a function that maps (number of stages, number of micro-batches, stage) to a list of
            actions. None: 1f1b; with several chunks interleaved, or zb-v for the placement "v".
        group_size: for "interleaved": micro-batches that run through a chunk before the next chunk starts; 0: the
            number of stages.

    Raises:
        ValueError: the name is unknown or does not fit ``placement``.
    """

    def __init__(self, schedule: Any, *, placement: Placement, stage: int, group_size: int = 0) -> None:
        self.placement, self.stage, self.group_size = placement, stage, group_size
        self.set_schedule(default_schedule(placement.num_chunks, placement.style) if schedule is None else schedule)

    def set_schedule(self, schedule: Any) -> None:
        """Use ``schedule`` from the next call on."""
        placement_args = self.placement.num_chunks, self.placement.style, self.group_size
        self.order: Order = schedule if callable(schedule) else schedule_named(schedule, *placement_args)
        self.name = schedule if isinstance(schedule, str) else getattr(schedule, "__name__", type(schedule).__name__)
        self._is_built_in = not callable(schedule)
        self._actions: dict[int, list[Action]] = {}
        self._limits: dict[tuple[int, bool], tuple[int, Posts]] = {}

    def training_actions(self, num_micro_batches: int) -> list[Action]:
        """List the actions in a ``train_batch``. A user's function is validated before its first use."""
        if num_micro_batches not in self._actions:
            self._validate(num_micro_batches)
            self._actions[num_micro_batches] = self.order(self.placement.num_stages, num_micro_batches, self.stage)
        return self._actions[num_micro_batches]

    def _validate(self, num_micro_batches: int) -> None:
        if not self._is_built_in and num_micro_batches not in self._actions:
            validate_order(self.order, self.name, num_micro_batches, self.placement)

    def evaluation_actions(self, num_micro_batches: int) -> list[Action]:
        """List the actions in an ``eval_batch``."""
        return _forward_order(self.placement.num_chunks)(self.placement.num_stages, num_micro_batches, self.stage)

    def message_limits(self, num_micro_batches: int, *, is_training: bool = True) -> tuple[int, Posts]:
        """Return the send window and the receives' posting times, as ``P2PCommunicator.set_limits`` expects them."""
        key = num_micro_batches, is_training
        if key not in self._limits:
            if is_training:
                self._validate(num_micro_batches)
            order = self.order if is_training else _forward_order(self.placement.num_chunks)
            schedule_args = self.placement.num_stages, num_micro_batches, self.placement.num_chunks
            window = send_window(order, *schedule_args, is_training, self.placement.style)
            posts = receive_posts(order, *schedule_args, self.placement.style)
            self._limits[key] = window, posts[self.stage]
        return self._limits[key]


@functools.lru_cache
def _forward_order(num_chunks: int) -> Order:
    return forward_only if num_chunks == 1 else functools.partial(forward_only, num_chunks=num_chunks)


def validate_order(order: Order, name: str, num_micro_batches: int, placement: Placement) -> None:
    """Validate a user's ``order``: raise ScheduleError if it is incomplete or would deadlock.

    Args:
        name: the schedule's name for the error message.
    """
    try:
        num_stages = placement.num_stages
        stages = [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]
        validate(stages, num_micro_batches, num_chunks=placement.num_chunks, placement=placement.style)
    except ScheduleError as error:
        raise ScheduleError(f"the schedule {name} cannot run: {error}") from error

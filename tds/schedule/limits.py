"""Limits on the messages of a schedule: the send window, and when each receive is posted."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from tds.schedule.actions import LOOP, Action, Backward
from tds.schedule.validate import Event, ScheduleError, run, validate

# The send window: how many messages to a neighbour may be in flight before a stage waits for the oldest.
#
# Without a limit a stage that runs ahead, as the first one in an evaluation, would keep everything it has sent. With
# too small a limit the schedule deadlocks: every stage waits to send, and none reaches the action that takes a
# message. This happens with chunks, whose messages form a ring. Which limits are safe depends on the whole schedule,
# so each is tried on it. The trial is stricter than a real run: it counts a message until it is taken, while a real
# send completes when the receive is posted, and it delays the action itself, while a real stage runs the action and
# waits afterwards.


@functools.lru_cache(maxsize=32)
def send_window(
    order: Callable[[int, int, int], Sequence[Action]],
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    is_training: bool = True,
    placement: str = LOOP,
) -> int:
    """Return a send window with which the schedule completes: p + 1, doubled as often as necessary.

    Raises:
        ScheduleError: it does not run whatever the limit.
    """
    stages = [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]
    prove = functools.partial(
        validate, stages, num_micro_batches, num_chunks=num_chunks, is_training=is_training, placement=placement
    )
    window, all_of_them = num_stages + 1, num_micro_batches * num_chunks
    while window < all_of_them:
        try:
            prove(window=window)
            return window
        except ScheduleError:
            window *= 2
    prove()
    return all_of_them


# When each receive is posted. On NCCL a posted receive is a kernel that waits for the sender, and a send is a kernel
# that waits for the receive. Anything that waits for the whole device then (a synchronize in a layer, the allocator,
# the first use of a kernel) waits for the other stage too. If that stage needs a later result of this one, or waits
# for its own device in the same way, both wait for ever.
#
# Therefore one run of the schedule is written down, action by action, and a receive is posted only after the last
# action of its stage that precedes the send in that run. Walking through the actions in this order, every message has
# arrived at every action, even if each host waits for its device before each action. A run that waits less often ends
# as well. Subject to this, no receive is posted more than ``ahead`` actions before it is needed, with the smallest
# ``ahead`` for which the schedule completes: 1 for 1F1B, GPipe and ZB-H1, mostly 1 to 3 for chunks, whose messages
# form a ring.

Posts = tuple[tuple[int, ...], ...]
"""For each action of a stage: the actions whose receives are posted before it."""


class _Message(NamedTuple):
    """A message between two stages. Actions are numbered on each stage from 0.

    Args:
        sent_by: action of ``sender`` that sends it.
        taken_by: action of ``receiver`` that needs it.
        earliest: first action of ``receiver`` before which the receive may be posted.
    """

    sender: int
    sent_by: int
    receiver: int
    taken_by: int
    earliest: int


class _Condition(NamedTuple):
    """The condition that ``stage`` has completed the wait before its action ``number``."""

    stage: int
    number: int


@functools.lru_cache(maxsize=32)
def receive_posts(
    order: Callable[[int, int, int], Sequence[Action]],
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    placement: str = LOOP,
) -> tuple[Posts, ...]:
    """Return, for each stage, before which action it posts each receive.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    stages = [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]
    messages = _messages_between(stages, num_chunks, placement)
    for ahead in itertools.count(1):
        posted_before = [max(message.earliest, message.taken_by - ahead) for message in messages]
        if _completes(messages, posted_before, [len(actions) for actions in stages]):
            break
    posts: list[list[list[int]]] = [[[] for _ in actions] for actions in stages]
    for message, number in zip(messages, posted_before, strict=True):
        posts[message.receiver][number].append(message.taken_by)
    return tuple(tuple(map(tuple, of_stage)) for of_stage in posts)


def _messages_between(stages: Sequence[Sequence[Action]], num_chunks: int, placement: str) -> list[_Message]:
    """Return the messages of one run in the order in which they are taken.

    In this run a whole backward takes two units of time, and every other action one.
    """
    begun: list[tuple[int, Event]] = []
    free_at = [0] * len(stages)
    arrives_at: dict[Any, int] = {}
    for event in run(stages, num_chunks, placement=placement):
        stage, action, source, takes, target, sends = event
        start = free_at[stage] if source is None else max(free_at[stage], arrives_at.pop((source, takes)))
        free_at[stage] = arrives_at[target, sends] = start + (2 if isinstance(action, Backward) else 1)
        begun.append((start, event))
    num_done = [0] * len(stages)
    sent: dict[Any, tuple[int, int, int]] = {}
    messages = []
    for _, (stage, _, source, takes, target, sends) in sorted(begun, key=itemgetter(0)):
        if source is not None:
            sender, number, earliest = sent.pop((source, takes))
            if sender != stage:
                messages.append(_Message(sender, number, stage, num_done[stage], earliest))
        if target is not None:
            sent[target, sends] = stage, num_done[stage], num_done[target.receiver]
        num_done[stage] += 1
    return messages


def _completes(messages: Sequence[_Message], posted_before: Sequence[int], num_actions: Sequence[int]) -> bool:
    """Return True if every stage reaches its end though it waits, before each action, for all messages it has started.

    For example stage 0 sends with its action 0, and stage 1 posts the receive before its action 2. Then stage 1 cannot
    begin action 2 until stage 0 is past the wait before action 0, and stage 0 cannot begin action 1 until stage 1 is
    past the wait before action 1.

    Args:
        posted_before: for each message, the action of its receiver before which the receive is posted.
    """
    conditions: list[list[list[_Condition]]] = [[[] for _ in range(count + 1)] for count in num_actions]
    for message, number in zip(messages, posted_before, strict=True):
        conditions[message.receiver][number].append(_Condition(message.sender, message.sent_by))
        conditions[message.sender][message.sent_by + 1].append(_Condition(message.receiver, number - 1))

    passed = [-1] * len(num_actions)  # by stage: the last action whose wait is over; the end counts as an action
    blocked: list[list[tuple[int, int]]] = [[] for _ in num_actions]  # by stage: (action it must pass, waiting stage)
    to_try = list(range(len(num_actions)))
    while to_try:
        stage = to_try.pop()
        while passed[stage] < num_actions[stage]:
            unmet = next((c for c in conditions[stage][passed[stage] + 1] if passed[c.stage] < c.number), None)
            if unmet is not None:
                blocked[unmet.stage].append((unmet.number, stage))
                break
            passed[stage] += 1
        to_try += [other for number, other in blocked[stage] if number <= passed[stage]]
        blocked[stage] = [(number, other) for number, other in blocked[stage] if number > passed[stage]]
    return passed == list(num_actions)

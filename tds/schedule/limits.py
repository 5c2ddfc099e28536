"""Limits on a schedule's messages: the send window and when receives are posted."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from tds.schedule.actions import LOOP, Action, Backward
from tds.schedule.validate import Event, ScheduleError, run, validate

# The send window is the number of messages to a neighbour that may be in flight before a stage waits for the oldest
# one.
#
# Without a limit, a stage that runs faster than its neighbour, such as the first stage in an evaluation, would retain
# all outputs it has sent. If the limit is too small, the schedule deadlocks: every stage waits to send, and none
# reaches the action that receives a message. This can happen with chunks, whose messages form a ring. Whether a limit
# is safe depends on the whole schedule, so each limit is tested by a dry run, which is stricter than a real run in two
# ways. It counts a message until an action receives it, while a real send completes when the receive is posted. And it
# delays the sending action, while a real stage runs the action and waits afterwards.


@functools.lru_cache(maxsize=32)
def send_window(
    order: Callable[[int, int, int], Sequence[Action]],
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    is_training: bool = True,
    placement: str = LOOP,
) -> int:
    """Find a send window with which the schedule ``order`` completes: p + 1, doubled as often as necessary.

    Raises:
        ScheduleError: the schedule does not complete with any window.
    """
    stages = [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]
    check_window = functools.partial(
        validate, stages, num_micro_batches, num_chunks=num_chunks, is_training=is_training, placement=placement
    )
    window, num_messages = num_stages + 1, num_micro_batches * num_chunks
    while window < num_messages:
        try:
            check_window(window=window)
            return window
        except ScheduleError:
            window *= 2
    check_window()
    return num_messages


# When receives are posted. With NCCL, a posted receive is a kernel that waits for the sender, and a send is a kernel
# that waits for the receive. An operation that waits for the whole device (a synchronize in a layer, the allocator, the
# first use of a kernel) then waits for the other stage too. If that stage needs a later result of this stage, or waits
# for its device in the same way, both stages wait forever.
#
# To avoid this, one run of the schedule is recorded action by action. A receive is posted only after all actions of its
# stage that precede the send in the recorded run. If the actions run in the recorded order, every message arrives
# in time, even if each host waits for its device before each action. A run with fewer waits completes as well. In
# addition, a receive is posted at most ``num_ahead`` actions before it is needed, with the smallest ``num_ahead`` for
# which the schedule completes: 1 for 1F1B, GPipe and ZB-H1, mostly 1 to 3 with chunks, whose messages form a ring.

Posts = tuple[tuple[int, ...], ...]
"""For each action of a stage, the indices of the actions whose receives are posted before it."""


class _Message(NamedTuple):
    """A message between two stages. Actions are given by their index on their stage.

    Args:
        send_idx: the action of ``sender`` that sends the message.
        receive_idx: the action of ``receiver`` that needs the message.
        earliest: the first action of ``receiver`` before which the receive may be posted.
    """

    sender: int
    send_idx: int
    receiver: int
    receive_idx: int
    earliest: int


class _Condition(NamedTuple):
    """The condition that ``stage`` has completed the wait before its action with index ``action_idx``."""

    stage: int
    action_idx: int


@functools.lru_cache(maxsize=32)
def receive_posts(
    order: Callable[[int, int, int], Sequence[Action]],
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    placement: str = LOOP,
) -> tuple[Posts, ...]:
    """Compute each stage's ``Posts`` in the schedule ``order``.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    stages = [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]
    messages = _messages_between(stages, num_chunks, placement)
    for num_ahead in itertools.count(1):
        posted_before = [max(message.earliest, message.receive_idx - num_ahead) for message in messages]
        if _completes(messages, posted_before, [len(actions) for actions in stages]):
            break
    posts: list[list[list[int]]] = [[[] for _ in actions] for actions in stages]
    for message, idx in zip(messages, posted_before, strict=True):
        posts[message.receiver][idx].append(message.receive_idx)
    return tuple(tuple(map(tuple, stage_posts)) for stage_posts in posts)


def _messages_between(stages: Sequence[Sequence[Action]], num_chunks: int, placement: str) -> list[_Message]:
    """List the messages of one run in the order in which they are received.

    In this run a full backward takes two units of time, and every other action one.
    """
    started: list[tuple[int, Event]] = []
    free_at = [0] * len(stages)
    arrives_at: dict[Any, int] = {}
    for event in run(stages, num_chunks, placement=placement):
        stage, action, source, received_content, target, sent_content = event
        start = free_at[stage] if source is None else max(free_at[stage], arrives_at.pop((source, received_content)))
        free_at[stage] = arrives_at[target, sent_content] = start + (2 if isinstance(action, Backward) else 1)
        started.append((start, event))
    num_started = [0] * len(stages)
    sent: dict[Any, tuple[int, int, int]] = {}
    messages = []
    for _, (stage, _, source, received_content, target, sent_content) in sorted(started, key=itemgetter(0)):
        if source is not None:
            sender, send_idx, earliest = sent.pop((source, received_content))
            if sender != stage:
                messages.append(_Message(sender, send_idx, stage, num_started[stage], earliest))
        if target is not None:
            sent[target, sent_content] = stage, num_started[stage], num_started[target.receiver]
        num_started[stage] += 1
    return messages


def _completes(messages: Sequence[_Message], posted_before: Sequence[int], num_actions: Sequence[int]) -> bool:
    """Return True if every stage completes, even if it waits for all its started messages before each action.

    A message completes only after it has been sent and its receive has been posted. Example: stage 0 sends in its
    action 0, and stage 1 posts the receive before its action 2. Then stage 1 cannot start action 2 until stage 0 has
    completed the wait before action 0, and stage 0 cannot start action 1 until stage 1 has completed the wait before
    action 1.

    Args:
        posted_before: for each message, the action of its receiver before which the receive is posted.
    """
    conditions: list[list[list[_Condition]]] = [[[] for _ in range(count + 1)] for count in num_actions]
    for message, idx in zip(messages, posted_before, strict=True):
        conditions[message.receiver][idx].append(_Condition(message.sender, message.send_idx))
        conditions[message.sender][message.send_idx + 1].append(_Condition(message.receiver, idx - 1))

    passed = [-1] * len(num_actions)  # by stage: the last action whose wait has completed; the end counts as an action
    blocked: list[list[tuple[int, int]]] = [[] for _ in num_actions]  # by stage: (action it must pass, waiting stage)
    pending_stages = list(range(len(num_actions)))
    while pending_stages:
        stage = pending_stages.pop()
        while passed[stage] < num_actions[stage]:
            unmet = next((c for c in conditions[stage][passed[stage] + 1] if passed[c.stage] < c.action_idx), None)
            if unmet is not None:
                blocked[unmet.stage].append((unmet.action_idx, stage))
                break
            passed[stage] += 1
        pending_stages += [waiter for idx, waiter in blocked[stage] if idx <= passed[stage]]
        blocked[stage] = [(idx, waiter) for idx, waiter in blocked[stage] if idx > passed[stage]]
    return passed == list(num_actions)

"""How many messages of a schedule may be on their way: how many sends may wait, and when each receive is posted."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from tds.schedule.actions import LOOP, Action, Backward
from tds.schedule.validate import Event, ScheduleError, run, validate

# How many messages a stage may have on their way to a neighbour before it waits for the oldest.
#
# Without a limit a stage that runs ahead, as the first does in an evaluation, would keep all that it has sent. With one
# a schedule can come to stand still: every stage waits to send, and none gets to the action that would take a message;
# around a ring of chunks this really happens. Which limits are safe depends on the whole schedule, so each is tried on
# it. The trial is strict: it counts messages that are not taken, while a real sender is freed when the receive is
# posted, which is earlier, and it holds the action back, while a real stage does it first and waits after.


@functools.lru_cache(maxsize=32)
def send_window(
    order: Callable[[int, int, int], Sequence[Action]],
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    is_training: bool = True,
    placement: str = LOOP,
) -> int:
    """Return a limit with which the schedule runs to its end: p + 1 where that is enough.

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


# When each receive is posted. On a GPU a posted receive is a kernel that waits, and a send is one that waits for it.
# Whatever waits for the whole device then (a synchronize in a layer, an allocator that gives memory back, a kernel that
# is loaded at its first use) waits for the other stage, too. Should that one need what this stage has still to run, or
# wait for its own device in just such a place, both would wait for ever.
#
# So one run of the schedule is written down, action by action. A receive is posted behind the last action of its stage
# that comes ahead of the send there. Then whoever goes through the actions in this order finds all messages arrived, at
# each action of each stage, even if every host waits for its device at every action; and as waiting for less cannot
# stop what waiting for all does not, every run ends. None is posted further ahead of its action than the least number
# of actions with which all of the schedule ends: one in 1F1B, GPipe and ZB-H1; with chunks, where messages go round a
# ring, mostly one to three; in a user's own what it takes.

Posts = tuple[tuple[int, ...], ...]
"""Of each action of a stage, by number: the actions whose receives are posted once the one before it is done."""


class _Travel(NamedTuple):
    """A message: the number of the action that sends it on its stage, of the one that takes it, and the least number of
    an action there ahead of which its receive may be posted."""

    sender: int
    sent: int
    receiver: int
    taken: int
    earliest: int


@functools.lru_cache(maxsize=32)
def receive_posts(
    order: Callable[[int, int, int], Sequence[Action]],
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    placement: str = LOOP,
) -> tuple[Posts, ...]:
    """Return, for each stage, when it posts what its actions receive.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    stages = [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]
    travels = _travels(stages, num_chunks, placement)
    for ahead in itertools.count(1):
        places = [max(each.earliest, each.taken - ahead) for each in travels]
        if _ends(travels, places, [len(actions) for actions in stages]):
            break
    posts: list[list[list[int]]] = [[[] for _ in actions] for actions in stages]
    for each, place in zip(travels, places, strict=True):
        posts[each.receiver][place].append(each.taken)
    return tuple(tuple(map(tuple, each)) for each in posts)


def _travels(stages: Sequence[Sequence[Action]], num_chunks: int, placement: str) -> list[_Travel]:
    """Return all messages between stages in the order in which they are taken where all actions take the same time, a
    whole backward twice as much."""
    begun: list[tuple[int, Event]] = []
    free_at = [0] * len(stages)
    arrives_at: dict[Any, int] = {}
    for event in run(stages, num_chunks, placement=placement):
        stage, action, source, takes, target, sends = event
        start = free_at[stage] if source is None else max(free_at[stage], arrives_at.pop((source, takes)))
        free_at[stage] = arrives_at[target, sends] = start + (2 if isinstance(action, Backward) else 1)
        begun.append((start, event))
    done = [0] * len(stages)
    sent: dict[Any, tuple[int, int, int]] = {}
    travels = []
    for _, (stage, _, source, takes, target, sends) in sorted(begun, key=itemgetter(0)):
        if source is not None:
            sender, number, earliest = sent.pop((source, takes))
            if sender != stage:
                travels.append(_Travel(sender, number, stage, done[stage], earliest))
        if target is not None:
            sent[target, sends] = stage, done[stage], done[target.receiver]
        done[stage] += 1
    return travels


def _ends(travels: Sequence[_Travel], places: Sequence[int], counts: Sequence[int]) -> bool:
    """Return whether all stages get through where each waits ahead of every action for all messages that it has
    started, when the receives are posted ahead of the actions of these ``places``."""
    needs: list[list[list[tuple[int, int]]]] = [[[] for _ in range(count + 1)] for count in counts]
    for (sender, sent, receiver, _, _), place in zip(travels, places, strict=True):
        needs[receiver][place].append((sender, sent))  # its send: that stage is past the wait ahead of this action
        needs[sender][sent + 1].append((receiver, place - 1))  # its receive
    past = [-1] * len(counts)
    waiting: list[list[tuple[int, int]]] = [[] for _ in counts]  # for this stage: how far it must be, who waits
    todo = list(range(len(counts)))
    while todo:
        stage = todo.pop()
        while past[stage] < counts[stage]:
            missing = next((need for need in needs[stage][past[stage] + 1] if past[need[0]] < need[1]), None)
            if missing is not None:
                waiting[missing[0]].append((missing[1], stage))
                break
            past[stage] += 1
        todo += [other for number, other in waiting[stage] if number <= past[stage]]
        waiting[stage] = [each for each in waiting[stage] if each[0] > past[stage]]
    return past == list(counts)

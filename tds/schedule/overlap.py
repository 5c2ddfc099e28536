"""Pairs: the forward of one micro-batch beside the backward of another, so that one computes while the other waits for
its tensor or expert group; which actions they are, and how long a schedule with them takes.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tds.schedule.actions import (
    LOOP,
    SENDS_GRADIENTS,
    Action,
    Forward,
    Message,
    Order,
    Placement,
    received,
    sent,
)
from tds.schedule.simulate import EARLIER, Costs, Span, Timeline, more_in_flight
from tds.schedule.validate import ScheduleError

# A pair is a forward and, next in its stage's order, the backward of another micro-batch or chunk, whole or for the
# input. The forward begins when its message is there, the backward beside it when its own is; each sends when it is
# done, and the stage goes on once both are. What follows from that:
#
# * The forward waits for nothing else than without pairs, and the backward for less. No circle can come of it.
# * A pair is only made where the backward's message does not hang on what its forward sends: else the two would run in
#   turn, and an error of the forward would leave the backward waiting for a message that cannot come. All stages are
#   run with pairs that begin with both messages there; where that stops, a pair is taken apart.
#
# 1f1b has just so many forwards in flight as hide the way to the last stage and back while its stages take turns: a
# forward that takes longer beside a backward delays all stages behind it. With pairs stage i of p begins p - i forwards
# earlier, so that all stages work on their pairs at once, and interleaved one earlier. That many more are in flight.
#
# Source: DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.2.1 (DualPipe); Megatron-LM's
# --overlap-moe-expert-parallel-comm, which begins one forward earlier, too.


def pairs(
    stages: Sequence[Sequence[Action]], num_chunks: int = 1, placement: str = LOOP
) -> tuple[frozenset[Action], ...]:
    """Return for each stage the forwards that run beside the backward behind them.

    Raises:
        ScheduleError: the schedule cannot run, with pairs or without.
    """
    return _Pairing(stages, Placement(len(stages), num_chunks, placement)).found()


def can_pair(first: Action, second: Action) -> bool:
    """Return whether these two, one behind the other, may be a pair."""
    is_kind = isinstance(first, Forward) and isinstance(second, SENDS_GRADIENTS)
    return is_kind and (first.micro_batch, first.chunk) != (second.micro_batch, second.chunk)


class _Pairing:
    """Runs all stages without time, each pair beginning with both messages there."""

    def __init__(self, stages: Sequence[Sequence[Action]], placement: Placement) -> None:
        self.stages, self.placement = stages, placement
        self.at = [0] * len(stages)
        self.there: set[tuple[int, Message]] = set()
        self.paired: list[set[Action]] = [set() for _ in stages]

    def found(self) -> tuple[frozenset[Action], ...]:
        todo = deque(range(len(self.stages)))
        while todo:
            self._run(todo)
            todo.extend(self._split_one())
        left = [stage for stage, at in enumerate(self.at) if at < len(self.stages[stage])]
        if left:
            raise ScheduleError(f"stages wait for each other: {left}, from {self.stages[left[0]][self.at[left[0]]]} on")
        return tuple(map(frozenset, self.paired))

    def _run(self, todo: deque[int]) -> None:
        """Let the stages ``todo``, and those that wait for what they send, go on as far as they can."""
        while todo:
            stage = todo.popleft()
            actions = self.stages[stage]
            while self.at[stage] < len(actions):
                first, second = self._next(stage)
                unit = (first,) if second is None or not can_pair(first, second) else (first, second)
                if not all(self._is_there(stage, action) for action in unit):
                    break
                todo.extend(self._done(stage, unit))

    def _split_one(self) -> list[int]:
        """Take one pair apart whose forward could begin; return the stages that may go on then."""
        for stage, at in enumerate(self.at):
            if at < len(self.stages[stage]) and self._is_there(stage, first := self._next(stage)[0]):
                return [stage, *self._done(stage, (first,))]
        return []

    def _next(self, stage: int) -> tuple[Action, Action | None]:
        actions, at = self.stages[stage], self.at[stage]
        return actions[at], actions[at + 1] if at + 1 < len(actions) else None

    def _is_there(self, stage: int, action: Action) -> bool:
        message = received(action, stage, self.placement)
        return message is None or (stage, message) in self.there

    def _done(self, stage: int, unit: Sequence[Action]) -> list[int]:
        """Count ``unit`` as done; return the stages that get something of it."""
        self.at[stage] += len(unit)
        if len(unit) == 2:
            self.paired[stage].add(unit[0])
        woken = []
        for action in unit:
            message = sent(action, stage, self.placement)
            if message is not None:
                self.there.add((message.peer, arrived(message, action, stage, self.placement)))
                woken.append(message.peer)
        return woken


def arrived(message: Message, action: Action, stage: int, placement: Placement) -> Message:
    """Return what ``action`` on ``stage`` sends as the other side looks at it."""
    piece = placement.piece(stage, action.chunk) + (1 if isinstance(action, Forward) else -1)
    return Message(message.kind, message.micro_batch, piece // placement.num_stages, stage)


# Orders with enough forwards in flight.


@functools.lru_cache(maxsize=32)
def with_earlier_forwards(order: Order, name: str) -> Order:
    """Return ``order``, of a schedule of that name, with as many more forwards in flight as its pairs need.

    Raises:
        ValueError: the schedule does not gain by pairs.
    """
    name = name.lower()
    if name not in EARLIER:
        raise ValueError(
            f"forwards run beside backwards in the schedules {', '.join(EARLIER)}, and in an order of one's own, got "
            f"{name}. Use one of these, or leave overlap_forward_backward (--overlap-forward-backward) out"
        )

    def earlier(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
        actions = order(num_stages, num_micro_batches, stage)
        return _earlier(actions, more_in_flight(name, num_stages, stage))

    return earlier


def _earlier(actions: Sequence[Action], by: int) -> list[Action]:
    """Return ``actions`` with each forward ahead of ``by`` more of the others."""
    forwards = [action for action in actions if isinstance(action, Forward)]
    made: list[Action] = []
    begun = 0
    placed = 0
    for action in actions:
        if isinstance(action, Forward):
            begun += 1
            continue
        upto = min(begun + by, len(forwards))
        made += [*forwards[placed:upto], action]
        placed = upto
    return made


# How long a schedule with pairs takes. Each action has a time of its own, of which ``waits`` are for its tensor or
# expert group. Two at once are taken for evenly mixed: while both together ask for less than all of the processor each
# goes on as if alone, and else both slow down alike. So a pair takes at least the larger of both times and of the sum
# of what both compute, which is the bound of all overlap, and more where one outlives the other.


@dataclass
class _Running:
    action: Action
    start: float
    left: float
    load: float


def simulate_pairs(
    stages: Sequence[Sequence[Action]], costs: Costs, waits: Costs, num_chunks: int = 1, placement: str = LOOP,
    *, paired: Sequence[frozenset[Action]] | None = None,
) -> Timeline:  # fmt: skip
    """Return the time line of a schedule with pairs; spans of a stage overlap where actions do.

    Args:
        costs: of each action, waiting included.
        waits: of these the seconds in which the action computes nothing.
        paired: what ``pairs`` returns; None: just that.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    found = pairs(stages, num_chunks, placement) if paired is None else paired
    return _Simulation(stages, costs, waits, Placement(len(stages), num_chunks, placement), found).run()


class _Simulation:
    def __init__(
        self, stages: Sequence[Sequence[Action]], costs: Costs, waits: Costs, placement: Placement,
        paired: Sequence[frozenset[Action]],
    ) -> None:  # fmt: skip
        self.stages, self.placement, self.paired = stages, placement, paired
        self.costs, self.waits, self.transfer = costs, waits, costs.transfer
        self.at = [0] * len(stages)
        self.running: list[list[_Running]] = [[] for _ in stages]
        self.there: dict[tuple[int, Message], float] = {}
        self.arrivals: list[float] = []  # a heap of times to come
        self.spans: list[list[Span]] = [[] for _ in stages]
        self.now = 0.0

    def run(self) -> Timeline:
        left = sum(map(len, self.stages))
        while left:
            for stage in range(len(self.stages)):
                while self._begins(stage):
                    pass
            self._advance()
            left -= sum(self._end(stage) for stage in range(len(self.stages)))
        order = [{action: number for number, action in enumerate(actions)} for actions in self.stages]
        rows = zip(self.spans, order, strict=True)
        return Timeline(tuple(tuple(sorted(row, key=lambda span: at[span.action])) for row, at in rows))

    def _begins(self, stage: int) -> bool:
        """Begin the next action of ``stage`` if it may."""
        running, at = self.running[stage], self.at[stage]
        if at == len(self.stages[stage]):
            return False
        action = self.stages[stage][at]
        if running and not (len(running) == 1 and self._is_beside(stage, running[0].action, at)):
            return False
        message = received(action, stage, self.placement)
        if message is not None and self.there.get((stage, message), math.inf) > self.now:
            return False
        piece = self.placement.piece(stage, action.chunk)
        cost, wait = self.costs.of(action, piece), self.waits.of(action, piece)
        running.append(_Running(action, self.now, cost, 1 - wait / cost if cost else 0.0))
        self.at[stage] += 1
        return True

    def _is_beside(self, stage: int, first: Action, at: int) -> bool:
        return self.stages[stage][at - 1] is first and first in self.paired[stage]

    def _advance(self) -> None:
        """Go on to the next end of an action or arrival of a message."""
        ends = [min(each.left for each in row) / self._pace(row) for row in self.running if row]
        while self.arrivals and self.arrivals[0] <= self.now:
            heapq.heappop(self.arrivals)
        arrivals = [self.arrivals[0] - self.now] if self.arrivals else []
        if not ends and not arrivals:
            raise ScheduleError("stages wait for each other")
        step = min([*ends, *arrivals])
        for row in self.running:
            done = step * self._pace(row)
            for each in row:
                each.left -= done
        self.now += step

    def _pace(self, row: Sequence[_Running]) -> float:
        return 1 / max(1.0, sum(each.load for each in row))

    def _end(self, stage: int) -> int:
        """Count the actions of ``stage`` that are done, and send what they made."""
        smallest = 1e-9 * max(self.costs.forward)
        ended = [each for each in self.running[stage] if each.left <= smallest]
        for each in ended:
            self.running[stage].remove(each)
            self.spans[stage].append(Span(each.action, each.start, self.now))
            message = sent(each.action, stage, self.placement)
            if message is not None:
                time = self.now + (0.0 if message.peer == stage else self.transfer)
                self.there[message.peer, arrived(message, each.action, stage, self.placement)] = time
                heapq.heappush(self.arrivals, time)
        return len(ended)

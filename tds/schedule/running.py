"""A schedule run without time: which actions can follow which, with the messages between stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tds.schedule.actions import Action
from tds.schedule.messages import Kind, Message, received, sent


class ScheduleError(ValueError):
    """A schedule that cannot run or would give wrong gradients."""


class Channel(NamedTuple):
    """One direction between two stages; its messages arrive in the order in which they were sent."""

    sender: int
    receiver: int
    kind: Kind


class Content(NamedTuple):
    """What a message holds: the output, or the output's gradient, of a piece of the model."""

    micro_batch: int
    piece: int


class Event(NamedTuple):
    """One action on its stage, with the message that it takes and the one that it sends, if any."""

    stage: int
    action: Action
    source: Channel | None
    takes: Content | None
    target: Channel | None
    sends: Content | None


Route = tuple[Channel | None, int, Channel | None, int]
"""What an action takes and from where, what it sends and to where: (channel, piece, channel, piece)."""


def run(stages: Sequence[Sequence[Action]], num_chunks: int = 1, window: int | None = None) -> Iterator[Event]:
    """Yield every action of every stage in an order in which they can run.

    Args:
        window: a sender waits while this many of its messages on one channel are not taken yet (None: never).

    Raises:
        ScheduleError: a message would be taken for another, stages wait in a circle, or a message is not taken.
    """
    return _Run(stages, num_chunks, window).events()


class _Run:
    def __init__(self, stages: Sequence[Sequence[Action]], num_chunks: int, window: int | None) -> None:
        self.num_chunks = num_chunks
        self.num_stages = len(stages)
        self.window = window
        self.wires: dict[Channel, deque[Content]] = {}
        self.routes: dict[tuple[int, type[Action], int], Route] = {}
        self.rest = [iter(actions) for actions in stages]
        self.next = [self._event(stage) for stage in range(self.num_stages)]

    def events(self) -> Iterator[Event]:
        """Let each stage go on as far as it can, and wake those that wait for what it did."""
        todo = deque(range(self.num_stages))
        queued = set(todo)
        while todo:
            stage = todo.popleft()
            queued.discard(stage)
            woken: set[int] = set()
            while (event := self.next[stage]) is not None and self._waits_for(event) is None:
                self._do(event)
                woken |= {
                    channel.sender + channel.receiver - stage for channel in (event.source, event.target) if channel
                }
                yield event
                self.next[stage] = self._event(stage)
            for peer in sorted(woken - queued):
                queued.add(peer)
                todo.append(peer)
        self._check_end()

    def _event(self, stage: int) -> Event | None:
        """Return what ``stage`` does next; None at its end."""
        action = next(self.rest[stage], None)
        if action is None:
            return None
        key = stage, type(action), action.chunk
        route = self.routes.get(key)
        if route is None:
            route = self.routes[key] = self._route(stage, action)
        source, taken, target, made = route
        takes = None if source is None else Content(action.micro_batch, taken)
        sends = None if target is None else Content(action.micro_batch, made)
        return Event(stage, action, source, takes, target, sends)

    def _route(self, stage: int, action: Action) -> Route:
        """Return the way of its messages, which is the same for all micro-batches."""
        place = stage, self.num_stages, self.num_chunks
        needed, made = received(action, *place), sent(action, *place)
        return (
            None if needed is None else Channel(needed.peer, stage, needed.kind),
            0 if needed is None else self._piece(needed, stage, is_incoming=True),
            None if made is None else Channel(stage, made.peer, made.kind),
            0 if made is None else self._piece(made, stage, is_incoming=False),
        )

    def _piece(self, message: Message, stage: int, *, is_incoming: bool) -> int:
        own = message.chunk * self.num_stages + stage
        is_from_before = (message.kind is Kind.ACTIVATION) == is_incoming
        return own - 1 if is_from_before else own

    def _waits_for(self, event: Event) -> int | None:
        """Return the stage for which ``event`` must wait, if any."""
        if event.source is not None and not self.wires.get(event.source):
            return event.source.sender
        if self.window is not None and event.target is not None:
            wire = self.wires.get(event.target, ())
            if len(wire) >= self.window:
                return event.target.receiver
        return None

    def _do(self, event: Event) -> None:
        """Take and send the messages of ``event``."""
        if event.source is not None and event.takes is not None:
            found = self.wires[event.source].popleft()
            if found != event.takes:
                raise ScheduleError(
                    f"messages must be taken in the order in which they are sent: stage {event.stage} at "
                    f"{event.action} would take the {_told(event.source, found)} for the "
                    f"{_told(event.source, event.takes)}"
                )
        if event.target is not None and event.sends is not None:
            wire = self.wires.get(event.target)
            if wire is None:
                wire = self.wires[event.target] = deque()
            wire.append(event.sends)

    def _check_end(self) -> None:
        waiting = {event.stage: event for event in self.next if event is not None}
        if waiting:
            raise ScheduleError(f"stages wait for each other: {self._told_circle(waiting)}")
        for channel, wire in self.wires.items():
            if wire:
                raise ScheduleError(f"stage {channel.receiver} never takes the {_told(channel, wire[0])}")

    def _told_circle(self, waiting: dict[int, Event]) -> str:
        """Tell who waits for whom, from the first stage that waits on, until the chain closes or ends."""
        stage: int | None = min(waiting)
        chain: list[int] = []
        while stage is not None and stage in waiting and stage not in chain:
            chain.append(stage)
            stage = self._waits_for(waiting[stage])
        told = [f"stage {i} at {waiting[i].action} for stage {self._waits_for(waiting[i])}" for i in chain]
        return "; ".join(told) + ("" if stage in waiting else ", which has no more to do")


def _told(channel: Channel, content: Content) -> str:
    name = channel.kind.name.lower()
    return f"{name} of micro-batch {content.micro_batch}, piece {content.piece}, from stage {channel.sender}"

"""Schedule validation: completeness, action order and freedom from deadlock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tds.schedule.actions import (
    LOOP,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    MessageType,
    Placement,
    received_message,
    sent_message,
)

# Dry run: the order of actions and messages, without times.


class ScheduleError(ValueError):
    """Raised for a schedule that cannot run or would compute wrong gradients."""


class Channel(NamedTuple):
    """Messages of one type from one stage to another; they arrive in the order in which they are sent."""

    sender: int
    receiver: int
    message_type: MessageType


class Content(NamedTuple):
    """Message content: a virtual stage's output for one micro-batch, or its gradient."""

    micro_batch: int
    virtual_stage: int


class Event(NamedTuple):
    """A stage's action with the messages that it receives and sends, or None."""

    stage: int
    action: Action
    source: Channel | None
    received_content: Content | None
    target: Channel | None
    sent_content: Content | None


Route = tuple[Channel | None, int, Channel | None, int]
"""(channel and virtual stage for the received message, then for the sent message)."""


def run(
    stages: Sequence[Sequence[Action]], num_chunks: int = 1, window: int | None = None, placement: str = LOOP
) -> Iterator[Event]:
    """Yield every action of every stage in an order in which they can run.

    Args:
        window: a sender waits while this many of its messages on a channel have not been received (None: never).

    Raises:
        ScheduleError: messages are received in the wrong order, the stages deadlock, or a message is never received.
    """
    return _Run(stages, Placement(len(stages), num_chunks, placement), window).events()


class _Run:
    def __init__(self, stages: Sequence[Sequence[Action]], placement: Placement, window: int | None) -> None:
        self.placement = placement
        self.window = window
        self.queues: dict[Channel, deque[Content]] = {}
        self.routes: dict[tuple[int, type[Action], int], Route] = {}
        self.remaining_actions = [iter(actions) for actions in stages]
        self.next_events = [self._event(stage) for stage in range(len(stages))]

    def events(self) -> Iterator[Event]:
        """Run each stage as far as possible, then the stages that its messages have unblocked."""
        stages_to_run = deque(range(len(self.next_events)))
        queued = set(stages_to_run)
        while stages_to_run:
            stage = stages_to_run.popleft()
            queued.discard(stage)
            unblocked_stages: set[int] = set()
            while (event := self.next_events[stage]) is not None and self._waits_for(event) is None:
                self._transfer(event)
                unblocked_stages |= {
                    channel.sender + channel.receiver - stage for channel in (event.source, event.target) if channel
                }
                yield event
                self.next_events[stage] = self._event(stage)
            for peer in sorted(unblocked_stages - queued):
                queued.add(peer)
                stages_to_run.append(peer)
        self._check_end()

    def _event(self, stage: int) -> Event | None:
        """Pop the next action of ``stage`` as an event; None at its end."""
        action = next(self.remaining_actions[stage], None)
        if action is None:
            return None
        key = stage, type(action), action.chunk
        route = self.routes.get(key)
        if route is None:
            route = self.routes[key] = self._route(stage, action)
        source, received_virtual_stage, target, sent_virtual_stage = route
        received_content = None if source is None else Content(action.micro_batch, received_virtual_stage)
        sent_content = None if target is None else Content(action.micro_batch, sent_virtual_stage)
        return Event(stage, action, source, received_content, target, sent_content)

    def _route(self, stage: int, action: Action) -> Route:
        """The route does not depend on the micro-batch."""
        incoming, outgoing = (
            received_message(action, stage, self.placement),
            sent_message(action, stage, self.placement),
        )
        virtual_stage = self.placement.virtual_stage(stage, action.chunk)
        return (
            None if incoming is None else Channel(incoming.peer, stage, incoming.message_type),
            virtual_stage - 1 if isinstance(action, Forward) else virtual_stage,
            None if outgoing is None else Channel(stage, outgoing.peer, outgoing.message_type),
            virtual_stage if isinstance(action, Forward) else virtual_stage - 1,
        )

    def _waits_for(self, event: Event) -> int | None:
        """Return the stage that ``event`` must wait for, or None."""
        if event.source is not None and not self.queues.get(event.source):
            return event.source.sender
        if self.window is not None and event.target is not None and event.target.receiver != event.stage:
            queue = self.queues.get(event.target, ())
            if len(queue) >= self.window:
                return event.target.receiver
        return None

    def _transfer(self, event: Event) -> None:
        if event.source is not None and event.received_content is not None:
            content = self.queues[event.source].popleft()
            if content != event.received_content:
                raise ScheduleError(
                    f"messages must be received in the order in which they are sent: stage {event.stage} at "
                    f"{event.action} would receive the {_format_content(event.source, content)} instead of the "
                    f"{_format_content(event.source, event.received_content)}"
                )
        if event.target is not None and event.sent_content is not None:
            queue = self.queues.get(event.target)
            if queue is None:
                queue = self.queues[event.target] = deque()
            queue.append(event.sent_content)

    def _check_end(self) -> None:
        waiting = {event.stage: event for event in self.next_events if event is not None}
        if waiting:
            raise ScheduleError(f"stages wait for each other: {self._format_cycle(waiting)}")
        for channel, queue in self.queues.items():
            if queue:
                raise ScheduleError(f"stage {channel.receiver} never receives the {_format_content(channel, queue[0])}")

    def _format_cycle(self, waiting: dict[int, Event]) -> str:
        """Format the chain of waits from the first waiting stage until it closes or ends."""
        stage: int | None = min(waiting)
        chain: list[int] = []
        while stage is not None and stage in waiting and stage not in chain:
            chain.append(stage)
            stage = self._waits_for(waiting[stage])
        links = [f"stage {i} at {waiting[i].action} for stage {self._waits_for(waiting[i])}" for i in chain]
        return "; ".join(links) + ("" if stage in waiting else ", which has no actions left")


def _format_content(channel: Channel, content: Content) -> str:
    name = channel.message_type.name.lower()
    return (
        f"{name} of micro-batch {content.micro_batch}, virtual stage {content.virtual_stage}, "
        f"from stage {channel.sender}"
    )


# Validation, and peak forwards in flight.

NOTHING, FORWARD_DONE, INPUT_DONE, DONE = range(4)
"""A micro-batch's progress in one chunk."""

TRANSITIONS: dict[type[Action], tuple[int, int]] = {
    Forward: (NOTHING, FORWARD_DONE),
    Backward: (FORWARD_DONE, DONE),
    BackwardInput: (FORWARD_DONE, INPUT_DONE),
    BackwardWeight: (INPUT_DONE, DONE),
}
"""Progress that each action requires, and progress after it."""

REQUIREMENTS: dict[type[Action], str] = {
    Forward: "before its backward",
    Backward: "after its Forward",
    BackwardInput: "after its Forward",
    BackwardWeight: "after its BackwardInput",
}
STATE_NAMES = {
    NOTHING: "nothing",
    FORWARD_DONE: "its Forward",
    INPUT_DONE: "its BackwardInput",
    DONE: "its full backward",
}
MISSING_ACTIONS = {NOTHING: "Forward", FORWARD_DONE: "Backward", INPUT_DONE: "BackwardWeight"}
ORDER_RULES = (
    ((Forward,), "forwards", "data are read in this order"),
    ((Backward, BackwardInput), "backwards", "so that gradients accumulate in the same order under every schedule"),
    (
        (Backward, BackwardWeight),
        "backwards of weights",
        "so that gradients accumulate in the same order under every schedule",
    ),
)


def validate(
    stages: Sequence[Sequence[Action]],
    num_micro_batches: int,
    *,
    num_chunks: int = 1,
    is_training: bool = True,
    window: int | None = None,
    placement: str = LOOP,
) -> list[int]:
    """Validate a schedule and return each stage's peak number of forwards in flight.

    A forward is in flight until its backward is complete, including the weight half. All chunks are counted.

    Args:
        stages: each stage's actions.
        placement: "loop" or "v"; see ``tds.schedule.actions.Placement``.
        window: a sender waits while this many of its messages on a channel have not been received (None: never).

    Raises:
        ScheduleError: an action is missing, duplicate, too early or not an action; messages are received in the wrong
            order; the stages deadlock; or a chunk does not process its micro-batches in rising order.
    """
    peaks = [_check_stage(i, actions, num_micro_batches, num_chunks, is_training) for i, actions in enumerate(stages)]
    for _ in run(stages, num_chunks, window, placement):
        pass
    for stage, actions in enumerate(stages):
        _check_order(stage, actions, num_chunks)
    return peaks


def _check_stage(
    stage: int, actions: Sequence[Action], num_micro_batches: int, num_chunks: int, is_training: bool
) -> int:
    """Check that each micro-batch and chunk has one forward and, in training, one backward; return the peak."""
    if not isinstance(actions, (list, tuple)):
        raise ScheduleError(
            f"the order of stage {stage} must be a list of Forward, Backward, BackwardInput and BackwardWeight, "
            f"got {_shorten(actions)}"
        )
    reached = [NOTHING] * (num_micro_batches * num_chunks)
    num_in_flight = peak = 0
    for action in actions:
        _check_action(stage, action, num_micro_batches, num_chunks)
        if not is_training and type(action) is not Forward:
            raise ScheduleError(f"stage {stage}: an evaluation must only have forwards, got {action}")
        idx = action.micro_batch * num_chunks + action.chunk
        required, done = TRANSITIONS[type(action)]
        if reached[idx] != required:
            raise ScheduleError(
                f"stage {stage}: {action} must run once, {REQUIREMENTS[type(action)]}, but it follows "
                f"{STATE_NAMES[reached[idx]]}"
            )
        reached[idx] = done
        if done == FORWARD_DONE:
            num_in_flight += 1
            peak = max(peak, num_in_flight)
        elif done == DONE:
            num_in_flight -= 1
    _check_complete(stage, reached, num_chunks, is_training)
    return peak


def _check_action(stage: int, action: object, num_micro_batches: int, num_chunks: int) -> None:
    if type(action) not in TRANSITIONS:
        raise ScheduleError(
            f"stage {stage}: an action must be a Forward, Backward, BackwardInput or BackwardWeight of tds.schedule, "
            f"got {_shorten(action)}"
        )
    micro_batch, chunk = action.micro_batch, action.chunk  # type: ignore[attr-defined]
    if type(micro_batch) is not int or type(chunk) is not int:
        raise ScheduleError(f"stage {stage}: micro_batch and chunk must be integers, got {action}")
    if not (0 <= micro_batch < num_micro_batches and 0 <= chunk < num_chunks):
        raise ScheduleError(
            f"stage {stage}: {action} is out of range for {num_micro_batches} micro-batches and {num_chunks} chunks, "
            "which are counted from 0"
        )


def _check_complete(stage: int, reached: list[int], num_chunks: int, is_training: bool) -> None:
    expected = DONE if is_training else FORWARD_DONE
    for idx, progress in enumerate(reached):
        if progress != expected:
            micro_batch, chunk = divmod(idx, num_chunks)
            raise ScheduleError(
                f"stage {stage} must have one {MISSING_ACTIONS[progress]} for each micro-batch in each chunk, got none "
                f"for {micro_batch=}, {chunk=}"
            )


def _check_order(stage: int, actions: Sequence[Action], num_chunks: int) -> None:
    """Check that each chunk's forwards, backwards and weight gradients are in micro-batch order."""
    for action_types, name, reason in ORDER_RULES:
        last = [-1] * num_chunks
        for action in actions:
            if type(action) in action_types:
                if action.micro_batch < last[action.chunk]:
                    raise ScheduleError(
                        f"stage {stage}: the {name} of a chunk must be in the order of the micro-batches ({reason}), "
                        f"got {action} after micro-batch {last[action.chunk]}"
                    )
                last[action.chunk] = action.micro_batch


def _shorten(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"

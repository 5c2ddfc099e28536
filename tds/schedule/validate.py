"""Proof that a schedule can run: complete, in order, free from deadlock; and what it holds in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tds.schedule.actions import Action, Backward, Forward
from tds.schedule.messages import Kind, Message, received, sent

Channel = tuple[int, int, Kind]


class ScheduleError(ValueError):
    """A schedule that cannot run or would give wrong gradients."""


def validate(
    stages: Sequence[Sequence[Action]],
    num_micro_batches: int,
    *,
    num_chunks: int = 1,
    is_training: bool = True,
    window: int | None = None,
) -> list[int]:
    """Return the peak number of forwards in flight on each stage, once the schedule is shown to run.

    Args:
        stages: the actions of each stage.
        window: a sender waits once this many of its messages on one channel are not taken yet (None: never).

    Raises:
        ScheduleError: an action is missing, twice or too early, messages would cross, or stages wait in a circle.
    """
    for stage, actions in enumerate(stages):
        _check_stage(stage, actions, num_micro_batches, num_chunks, is_training)
    _run(stages, num_chunks, window)
    return [_peak(actions) for actions in stages]


def _check_stage(
    stage: int, actions: Sequence[Action], num_micro_batches: int, num_chunks: int, is_training: bool
) -> None:
    """Each micro-batch and chunk has one forward and, in training, one backward after it."""
    seen: set[Action] = set()
    for action in actions:
        name = f"stage {stage}: {action}"
        if action in seen:
            raise ScheduleError(f"{name} appears twice")
        if not (0 <= action.micro_batch < num_micro_batches and 0 <= action.chunk < num_chunks):
            raise ScheduleError(f"{name} is outside {num_micro_batches} micro-batches and {num_chunks} chunks")
        if isinstance(action, Backward) and Forward(action.micro_batch, action.chunk) not in seen:
            raise ScheduleError(f"{name} comes before its forward")
        seen.add(action)
    expected = num_micro_batches * num_chunks * (2 if is_training else 1)
    if len(actions) != expected:
        raise ScheduleError(f"stage {stage} must have {expected} actions, got {len(actions)}")


def _run(stages: Sequence[Sequence[Action]], num_chunks: int, window: int | None) -> None:
    """Run the schedule without time: a stage moves on when what it waits for is there."""
    num_stages = len(stages)
    wires: dict[Channel, deque[tuple[int, int]]] = {}
    places = [0] * num_stages
    todo = deque(range(num_stages))
    queued = set(todo)
    while todo:
        stage = todo.popleft()
        queued.discard(stage)
        while places[stage] < len(stages[stage]):
            moved = _step(stages[stage][places[stage]], stage, num_stages, num_chunks, wires, window)
            if moved is None:
                break
            places[stage] += 1
            for peer in moved:
                if peer not in queued:
                    queued.add(peer)
                    todo.append(peer)
    waiting = [f"stage {i} at {stages[i][places[i]]}" for i in range(num_stages) if places[i] < len(stages[i])]
    if waiting:
        raise ScheduleError("stages wait for each other: " + "; ".join(waiting))
    left = [channel for channel, wire in wires.items() if wire]
    if left:
        raise ScheduleError(f"messages that nobody takes on {left}")


def _step(
    action: Action,
    stage: int,
    num_stages: int,
    num_chunks: int,
    wires: dict[Channel, deque[tuple[int, int]]],
    window: int | None,
) -> list[int] | None:
    """Take what ``action`` needs and send what it makes; return the peers this may wake, or None if it must wait."""
    needed = received(action, stage, num_stages, num_chunks)
    made = sent(action, stage, num_stages, num_chunks)
    out = None
    if made is not None:
        out = wires.setdefault((stage, made.peer, made.kind), deque())
        if window is not None and len(out) >= window and stage != made.peer:
            return None
    if needed is not None:
        wire = wires.setdefault((needed.peer, stage, needed.kind), deque())
        if not wire:
            return None
        if wire[0] != (needed.micro_batch, _piece(needed, stage, num_stages, incoming=True)):
            raise ScheduleError(f"stage {stage}: {action} would take the message {wire[0]} of stage {needed.peer}")
        wire.popleft()
    if made is not None and out is not None:
        out.append((made.micro_batch, _piece(made, stage, num_stages, incoming=False)))
    return [message.peer for message in (needed, made) if message is not None]


def _piece(message: Message, stage: int, num_stages: int, *, incoming: bool) -> int:
    """Return the piece of the model whose output (or output's gradient) the message holds."""
    own = message.chunk * num_stages + stage
    came_from_before = (message.kind is Kind.ACTIVATION) == incoming
    return own - 1 if came_from_before else own


def _peak(actions: Sequence[Action]) -> int:
    """Return the largest number of forwards whose backward has not run."""
    now = peak = 0
    for action in actions:
        now += 1 if isinstance(action, Forward) else -1
        peak = max(peak, now)
    return peak

"""Proof that a schedule can run: complete, in order, free from deadlock; and what it holds in memory."""

from __future__ import annotations

from collections.abc import Sequence

from tds.schedule.actions import Action, Backward, BackwardInput, BackwardWeight, Forward
from tds.schedule.running import ScheduleError, run

NOTHING, FORWARD_DONE, INPUT_DONE, DONE = range(4)
"""How far a micro-batch is in one chunk."""

STEPS: dict[type[Action], tuple[int, int]] = {
    Forward: (NOTHING, FORWARD_DONE),
    Backward: (FORWARD_DONE, DONE),
    BackwardInput: (FORWARD_DONE, INPUT_DONE),
    BackwardWeight: (INPUT_DONE, DONE),
}
"""What an action needs to have been done, and what is done after it."""

WHEN: dict[type[Action], str] = {
    Forward: "first of all",
    Backward: "after its Forward",
    BackwardInput: "after its Forward",
    BackwardWeight: "after its BackwardInput",
}
TOLD = {NOTHING: "nothing", FORWARD_DONE: "its Forward", INPUT_DONE: "its BackwardInput", DONE: "its whole backward"}
MISSING = {NOTHING: "Forward", FORWARD_DONE: "Backward", INPUT_DONE: "BackwardWeight"}
RISING = (
    ((Forward,), "forwards", "data are read in this order"),
    ((Backward, BackwardInput), "backwards", "gradients then add up in the same order under every schedule"),
    (
        (Backward, BackwardWeight),
        "backwards of weights",
        "gradients then add up in the same order under every schedule",
    ),
)


def validate(
    stages: Sequence[Sequence[Action]],
    num_micro_batches: int,
    *,
    num_chunks: int = 1,
    is_training: bool = True,
    window: int | None = None,
) -> list[int]:
    """Return the peak number of forwards in flight on each stage, once the schedule is shown to run.

    A forward is in flight until all of its backward is done, the weights' half too. With chunks each counts.

    Args:
        stages: the actions of each stage.
        window: a sender waits while this many of its messages on one channel are not taken yet (None: never).

    Raises:
        ScheduleError: an action is missing, twice, too early or no action at all; messages would cross; stages wait in
            a circle; or a chunk does not go by rising micro-batch.
    """
    peaks = [_check_stage(i, actions, num_micro_batches, num_chunks, is_training) for i, actions in enumerate(stages)]
    for _ in run(stages, num_chunks, window):
        pass
    for stage, actions in enumerate(stages):
        _check_rising(stage, actions, num_chunks)
    return peaks


def _check_stage(
    stage: int, actions: Sequence[Action], num_micro_batches: int, num_chunks: int, is_training: bool
) -> int:
    """Return the most forwards in flight. Each micro-batch and chunk has one forward and, in training, one backward."""
    if not isinstance(actions, (list, tuple)):
        raise ScheduleError(
            f"the order of stage {stage} must be a list of Forward, Backward, BackwardInput and BackwardWeight, "
            f"got {_shortened(actions)}"
        )
    reached = [NOTHING] * (num_micro_batches * num_chunks)
    now = peak = 0
    for action in actions:
        _check_action(stage, action, num_micro_batches, num_chunks)
        if not is_training and type(action) is not Forward:
            raise ScheduleError(f"stage {stage}: an evaluation must have forwards only, got {action}")
        place = action.micro_batch * num_chunks + action.chunk
        needed, done = STEPS[type(action)]
        if reached[place] != needed:
            raise ScheduleError(
                f"stage {stage}: {action} must come once, {WHEN[type(action)]}, got it when "
                f"{TOLD[reached[place]]} was done"
            )
        reached[place] = done
        if done == FORWARD_DONE:
            now += 1
            peak = max(peak, now)
        elif done == DONE:
            now -= 1
    _check_complete(stage, reached, num_chunks, is_training)
    return peak


def _check_action(stage: int, action: object, num_micro_batches: int, num_chunks: int) -> None:
    if type(action) not in STEPS:
        raise ScheduleError(
            f"stage {stage}: an action must be a Forward, Backward, BackwardInput or BackwardWeight of tds.schedule, "
            f"got {_shortened(action)}"
        )
    micro_batch, chunk = action.micro_batch, action.chunk  # type: ignore[attr-defined]
    if type(micro_batch) is not int or type(chunk) is not int:
        raise ScheduleError(f"stage {stage}: micro_batch and chunk must be integers, got {action}")
    if not (0 <= micro_batch < num_micro_batches and 0 <= chunk < num_chunks):
        raise ScheduleError(
            f"stage {stage}: {action} is outside {num_micro_batches} micro-batches and {num_chunks} chunks, "
            "which count from 0"
        )


def _check_complete(stage: int, reached: list[int], num_chunks: int, is_training: bool) -> None:
    wanted = DONE if is_training else FORWARD_DONE
    for place, found in enumerate(reached):
        if found != wanted:
            micro_batch, chunk = divmod(place, num_chunks)
            raise ScheduleError(
                f"stage {stage} must have one {MISSING[found]} of each micro-batch in each chunk, got none of "
                f"{micro_batch=}, {chunk=}"
            )


def _check_rising(stage: int, actions: Sequence[Action], num_chunks: int) -> None:
    """Within each chunk, forwards, backwards and the adding up of gradients go by rising micro-batch."""
    for kinds, name, reason in RISING:
        last = [-1] * num_chunks
        for action in actions:
            if type(action) in kinds:
                if action.micro_batch < last[action.chunk]:
                    raise ScheduleError(
                        f"stage {stage}: the {name} of a chunk must go by rising micro-batch ({reason}), got {action} "
                        f"after that of micro-batch {last[action.chunk]}"
                    )
                last[action.chunk] = action.micro_batch


def _shortened(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"

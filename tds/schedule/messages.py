"""Which messages an action receives and sends. Communication is derived from the actions, never written by hand.

With c chunks per stage the model is cut into p c pieces; piece ``chunk * p + stage`` lies on ``stage``. So the piece
after the last stage's is the next chunk of stage 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from tds.schedule.actions import Action, Backward, BackwardInput, Forward

SENDS_GRADIENTS = (Backward, BackwardInput)


class Kind(IntEnum):
    """What a message holds; also its tag on the wire."""

    ACTIVATION = 0
    GRADIENT = 1
    HEADER = 2


@dataclass(frozen=True, slots=True)
class Message:
    """Tensors of one micro-batch that cross from one stage to another.

    ``chunk`` is the chunk of the stage that looks at it: the receiver's in ``received``, the sender's in ``sent``.
    """

    kind: Kind
    micro_batch: int
    chunk: int
    peer: int


def is_first_piece(chunk: int, stage: int) -> bool:
    """True where the data comes in."""
    return chunk == 0 and stage == 0


def is_last_piece(chunk: int, stage: int, num_stages: int, num_chunks: int = 1) -> bool:
    """True where the loss is."""
    return chunk == num_chunks - 1 and stage == num_stages - 1


def received(action: Action, stage: int, num_stages: int, num_chunks: int = 1) -> Message | None:
    """Return the message that ``action`` on ``stage`` waits for, if any."""
    if isinstance(action, Forward) and not is_first_piece(action.chunk, stage):
        return Message(Kind.ACTIVATION, action.micro_batch, action.chunk, (stage - 1) % num_stages)
    if isinstance(action, SENDS_GRADIENTS) and not is_last_piece(action.chunk, stage, num_stages, num_chunks):
        return Message(Kind.GRADIENT, action.micro_batch, action.chunk, (stage + 1) % num_stages)
    return None


def sent(action: Action, stage: int, num_stages: int, num_chunks: int = 1) -> Message | None:
    """Return the message that ``action`` on ``stage`` sends when done, if any."""
    if isinstance(action, Forward) and not is_last_piece(action.chunk, stage, num_stages, num_chunks):
        return Message(Kind.ACTIVATION, action.micro_batch, action.chunk, (stage + 1) % num_stages)
    if isinstance(action, SENDS_GRADIENTS) and not is_first_piece(action.chunk, stage):
        return Message(Kind.GRADIENT, action.micro_batch, action.chunk, (stage - 1) % num_stages)
    return None

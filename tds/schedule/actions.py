"""Actions (Forward, Backward, BackwardInput, BackwardWeight), where the pieces of the model lie, and the messages of
actions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

# What a stage can do. A schedule is a list of these for each stage.


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work on one micro-batch, for one chunk of layers of the stage."""

    micro_batch: int
    chunk: int = 0


class Forward(Action):
    """Run the layers; the output goes to the next piece of the model, or into the loss in the last."""

    __slots__ = ()


class Backward(Action):
    """Run the whole backward: gradients of the weights, and of the input for the piece before."""

    __slots__ = ()


class BackwardInput(Action):
    """Run the part of the backward that the piece before waits for; linear layers put their weights' off."""

    __slots__ = ()


class BackwardWeight(Action):
    """Compute the gradients of weights that the ``BackwardInput`` of this micro-batch and chunk put off."""

    __slots__ = ()


# Where the pieces of the model lie. With c chunks per stage the model is cut into p c pieces, and a stage holds c.
#
# | placement | piece k of p = 3, c = 2 lies on stage | stage of chunk c and stage s |
# |---|---|---|
# | loop | 0 1 2 0 1 2 | piece c p + s |
# | v | 0 1 2 2 1 0 | piece c p + s in even chunks, c p + p - 1 - s in odd ones |
#
# In a V the first and the last piece lie on stage 0, and what turns at an end stays on its stage.

LOOP, V = "loop", "v"
PLACEMENTS = (LOOP, V)


@dataclass(frozen=True, slots=True)
class Placement:
    """Which piece of the model lies on which stage.

    Raises:
        ValueError: no such kind, or a V of one chunk.
    """

    num_stages: int
    num_chunks: int = 1
    kind: str = LOOP

    def __post_init__(self) -> None:
        if self.kind not in PLACEMENTS or (self.kind == V and self.num_chunks == 1):
            raise ValueError(
                f"placement must be one of {', '.join(PLACEMENTS)}, and a {V} needs 2 or more chunks on each stage, "
                f"got {self.kind!r} with {self.num_chunks} chunks"
            )

    @property
    def num_pieces(self) -> int:
        return self.num_stages * self.num_chunks

    def piece(self, stage: int, chunk: int) -> int:
        """Return the number in the model of a stage's chunk."""
        return chunk * self.num_stages + self._mirrored(stage, chunk)

    def stage_of(self, piece: int) -> int:
        """Return the stage that holds a piece; beyond both ends as if the model went on."""
        chunk, place = divmod(piece, self.num_stages)
        return self._mirrored(place, chunk)

    def own_pieces(self, stage: int) -> list[int]:
        """Return the pieces of a stage, by chunk."""
        return [self.piece(stage, chunk) for chunk in range(self.num_chunks)]

    @property
    def last_stage(self) -> int:
        """The stage that has the loss."""
        return self.stage_of(self.num_pieces - 1)

    def _mirrored(self, place: int, chunk: int) -> int:
        return self.num_stages - 1 - place if self.kind == V and chunk % 2 else place


# Which messages an action receives and sends. Communication is derived from the actions, never written by hand.

SENDS_GRADIENTS = (Backward, BackwardInput)


class Kind(IntEnum):
    """What a message holds; also its tag on the wire."""

    ACTIVATION = 0
    GRADIENT = 1
    HEADER = 2


@dataclass(frozen=True, slots=True)
class Message:
    """Tensors of one micro-batch that go from one piece to the next, or their gradients back.

    ``chunk`` is the chunk of the stage that looks at it: the receiver's in ``received``, the sender's in ``sent``.
    ``peer`` is the other stage; where it is the own one, nothing travels.
    """

    kind: Kind
    micro_batch: int
    chunk: int
    peer: int


def received(action: Action, stage: int, placement: Placement) -> Message | None:
    """Return the message that ``action`` on ``stage`` waits for, if any."""
    piece = placement.piece(stage, action.chunk)
    if isinstance(action, Forward) and piece > 0:
        return Message(Kind.ACTIVATION, action.micro_batch, action.chunk, placement.stage_of(piece - 1))
    if isinstance(action, SENDS_GRADIENTS) and piece < placement.num_pieces - 1:
        return Message(Kind.GRADIENT, action.micro_batch, action.chunk, placement.stage_of(piece + 1))
    return None


def sent(action: Action, stage: int, placement: Placement) -> Message | None:
    """Return the message that ``action`` on ``stage`` sends when done, if any."""
    piece = placement.piece(stage, action.chunk)
    if isinstance(action, Forward) and piece < placement.num_pieces - 1:
        return Message(Kind.ACTIVATION, action.micro_batch, action.chunk, placement.stage_of(piece + 1))
    if isinstance(action, SENDS_GRADIENTS) and piece > 0:
        return Message(Kind.GRADIENT, action.micro_batch, action.chunk, placement.stage_of(piece - 1))
    return None


# What every order of work asks of its arguments.

Order = Callable[[int, int, int], list[Action]]
"""A function of (number of stages, number of micro-batches, stage) to what the stage does."""


def check_sizes(num_stages: int, num_micro_batches: int, stage: int, num_chunks: int = 1) -> None:
    """Raise ValueError unless there is such a stage with work to do."""
    if num_stages < 1 or num_micro_batches < 1 or not 0 <= stage < num_stages:
        raise ValueError(
            f"a schedule needs num_stages >= 1, num_micro_batches >= 1 and 0 <= stage < num_stages, got "
            f"num_stages={num_stages}, num_micro_batches={num_micro_batches}, stage={stage}"
        )
    if num_chunks < 1 or (num_chunks > 1 and num_stages == 1):
        raise ValueError(
            f"a schedule needs num_chunks >= 1, and num_stages >= 2 for more than one chunk, got "
            f"num_chunks={num_chunks}, num_stages={num_stages}. Lower chunks= of the module, or add stages."
        )

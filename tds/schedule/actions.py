"""Actions of a schedule, the placement of the model's pieces on the stages, and the messages of actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

# Actions. A schedule is a list of actions for each stage.


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of work on one micro-batch, for one chunk of a stage's layers."""

    micro_batch: int
    chunk: int = 0


class Forward(Action):
    """Run the layers and send the output to the next piece; the last piece computes the loss."""

    __slots__ = ()


class Backward(Action):
    """Run the full backward: compute the weight gradients, and the input gradient for the previous piece."""

    __slots__ = ()


class BackwardInput(Action):
    """Compute the input gradient, which the previous piece waits for, and defer weight gradients."""

    __slots__ = ()


class BackwardWeight(Action):
    """Compute the weight gradients that the ``BackwardInput`` of this micro-batch and chunk deferred."""

    __slots__ = ()


# Placement of the pieces. With c chunks per stage, the model is split into p c pieces, and each stage has c of them.
#
# | placement | stages of pieces 0, 1, ... for p = 3, c = 2 | piece of chunk c on stage s |
# |---|---|---|
# | loop | 0 1 2 0 1 2 | c p + s |
# | v | 0 1 2 2 1 0 | c p + s for even c, c p + p - 1 - s for odd c |
#
# With two chunks in a "v", the first and the last piece are on stage 0. Consecutive pieces at a turn are on the same
# stage, so their message needs no communication.

LOOP, V = "loop", "v"
PLACEMENTS = (LOOP, V)


@dataclass(frozen=True, slots=True)
class Placement:
    """Assignment of the model's pieces to stages.

    Raises:
        ValueError: the kind is unknown, or "v" with a single chunk.
    """

    num_stages: int
    num_chunks: int = 1
    kind: str = LOOP

    def __post_init__(self) -> None:
        if self.kind not in PLACEMENTS or (self.kind == V and self.num_chunks == 1):
            raise ValueError(
                f"placement must be one of {', '.join(PLACEMENTS)}, and {V} needs 2 or more chunks per stage, "
                f"got {self.kind!r} with {self.num_chunks} chunks"
            )

    @property
    def num_pieces(self) -> int:
        return self.num_stages * self.num_chunks

    def piece(self, stage: int, chunk: int) -> int:
        """Return the index of the piece that ``stage`` has as ``chunk``."""
        return chunk * self.num_stages + self._mirrored(stage, chunk)

    def stage_of(self, piece: int) -> int:
        """Return the stage of a piece. Indices before the first or after the last piece continue the pattern."""
        chunk, position = divmod(piece, self.num_stages)
        return self._mirrored(position, chunk)

    def own_pieces(self, stage: int) -> list[int]:
        """Return the pieces of a stage in the order of its chunks."""
        return [self.piece(stage, chunk) for chunk in range(self.num_chunks)]

    @property
    def last_stage(self) -> int:
        """The stage that computes the loss."""
        return self.stage_of(self.num_pieces - 1)

    def _mirrored(self, place: int, chunk: int) -> int:
        return self.num_stages - 1 - place if self.kind == V and chunk % 2 else place


# Messages. The communication of a stage is derived from its actions.

SENDS_GRADIENTS = (Backward, BackwardInput)


class Kind(IntEnum):
    """Type of a message; also its communication tag."""

    ACTIVATION = 0
    GRADIENT = 1
    HEADER = 2


@dataclass(frozen=True, slots=True)
class Message:
    """Activations of one micro-batch for the next piece, or their gradients for the previous one.

    ``received`` and ``sent`` describe a message from the point of view of one stage.

    Attributes:
        chunk: the chunk of that stage: the receiving chunk in ``received``, the sending chunk in ``sent``.
        peer: the other stage. If it is the same stage, nothing is transferred.
    """

    kind: Kind
    micro_batch: int
    chunk: int
    peer: int


def received(action: Action, stage: int, placement: Placement) -> Message | None:
    """Return the message that ``action`` on ``stage`` waits for, or None."""
    piece = placement.piece(stage, action.chunk)
    if isinstance(action, Forward) and piece > 0:
        return Message(Kind.ACTIVATION, action.micro_batch, action.chunk, placement.stage_of(piece - 1))
    if isinstance(action, SENDS_GRADIENTS) and piece < placement.num_pieces - 1:
        return Message(Kind.GRADIENT, action.micro_batch, action.chunk, placement.stage_of(piece + 1))
    return None


def sent(action: Action, stage: int, placement: Placement) -> Message | None:
    """Return the message that ``action`` on ``stage`` sends at its end, or None."""
    piece = placement.piece(stage, action.chunk)
    if isinstance(action, Forward) and piece < placement.num_pieces - 1:
        return Message(Kind.ACTIVATION, action.micro_batch, action.chunk, placement.stage_of(piece + 1))
    if isinstance(action, SENDS_GRADIENTS) and piece > 0:
        return Message(Kind.GRADIENT, action.micro_batch, action.chunk, placement.stage_of(piece - 1))
    return None


# Functions that return the actions of a stage, and the check of their arguments.

Order = Callable[[int, int, int], list[Action]]
"""Maps (number of stages, number of micro-batches, stage) to the list of actions of that stage."""


def check_sizes(num_stages: int, num_micro_batches: int, stage: int, num_chunks: int = 1) -> None:
    """Raise ValueError if a size is not positive, ``stage`` does not exist, or a single stage has several chunks."""
    if num_stages < 1 or num_micro_batches < 1 or not 0 <= stage < num_stages:
        raise ValueError(
            f"a schedule needs num_stages >= 1, num_micro_batches >= 1 and 0 <= stage < num_stages, got "
            f"num_stages={num_stages}, num_micro_batches={num_micro_batches}, stage={stage}"
        )
    if num_chunks < 1 or (num_chunks > 1 and num_stages == 1):
        raise ValueError(
            f"a schedule needs num_chunks >= 1, and num_stages >= 2 for more than one chunk, got "
            f"num_chunks={num_chunks}, num_stages={num_stages}. Reduce chunks= of the module, or add stages."
        )

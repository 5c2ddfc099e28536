"""Schedule actions, the placement of virtual stages on stages, and the actions' messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from tds.renamed import Renamed

# Actions. A schedule has one action list per stage.


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of work on one micro-batch, for one chunk of a stage's layers."""

    micro_batch: int
    chunk: int = 0


class Forward(Action):
    """Run the layers and send the output to the next virtual stage; the last one computes the loss."""

    __slots__ = ()


class Backward(Action):
    """Run the full backward: compute the weight gradients, and the input gradient for the previous virtual stage."""

    __slots__ = ()


class BackwardInput(Action):
    """Compute the input gradient, which the previous virtual stage waits for, and defer weight gradients."""

    __slots__ = ()


class BackwardWeight(Action):
    """Compute the weight gradients that the ``BackwardInput`` of this micro-batch and chunk deferred."""

    __slots__ = ()


# Virtual-stage placement. With c chunks per stage, the model is split into p c virtual stages, and each stage
# has c of them.
#
# | placement | stages of virtual stages 0, 1, ... for p = 3, c = 2 | virtual stage of chunk c on stage s |
# |---|---|---|
# | loop | 0 1 2 0 1 2 | c p + s |
# | v | 0 1 2 2 1 0 | c p + s for even c, c p + p - 1 - s for odd c |
#
# With two chunks in a "v", the first and the last virtual stage are on stage 0. Consecutive virtual stages at a turn
# are on the same stage, so their message needs no communication.

LOOP, V = "loop", "v"
PLACEMENTS = (LOOP, V)


@dataclass(frozen=True, slots=True)
class Placement:
    """Assignment of virtual stages to stages.

    Raises:
        ValueError: ``style`` is unknown, or "v" with a single chunk.
    """

    num_stages: int
    num_chunks: int = 1
    style: str = LOOP

    def __post_init__(self) -> None:
        if self.style not in PLACEMENTS or (self.style == V and self.num_chunks == 1):
            raise ValueError(
                f"placement must be one of {', '.join(PLACEMENTS)}, and {V} needs 2 or more chunks per stage, "
                f"got {self.style!r} with {self.num_chunks} chunks"
            )

    @property
    def num_virtual_stages(self) -> int:
        return self.num_stages * self.num_chunks

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Return the virtual stage that is ``chunk`` of ``stage``."""
        return chunk * self.num_stages + self._mirrored(stage, chunk)

    def stage_of(self, virtual_stage: int) -> int:
        """Return a virtual stage's stage. Indices below 0 or after the last one continue the pattern."""
        chunk, position = divmod(virtual_stage, self.num_stages)
        return self._mirrored(position, chunk)

    kind = Renamed("style")
    num_pieces = Renamed("num_virtual_stages")
    piece = Renamed("virtual_stage")
    own_pieces = Renamed("virtual_stages_of")

    def virtual_stages_of(self, stage: int) -> list[int]:
        """List a stage's virtual stages in the order of its chunks."""
        return [self.virtual_stage(stage, chunk) for chunk in range(self.num_chunks)]

    @property
    def last_stage(self) -> int:
        """The stage that computes the loss."""
        return self.stage_of(self.num_virtual_stages - 1)

    def _mirrored(self, position: int, chunk: int) -> int:
        return self.num_stages - 1 - position if self.style == V and chunk % 2 else position


# Messages. A stage's communication is derived from its actions.

GRADIENT_SENDERS = (Backward, BackwardInput)


class MessageType(IntEnum):
    """Message type; also its communication tag."""

    ACTIVATION = 0
    GRADIENT = 1
    HEADER = 2


@dataclass(frozen=True, slots=True)
class Message:
    """A micro-batch's activations for the next virtual stage, or their gradients for the previous one.

    ``received_message`` and ``sent_message`` describe a message from one stage's point of view.

    Attributes:
        chunk: that stage's chunk: the receiving chunk in ``received_message``, the sending chunk in
            ``sent_message``.
        peer: the other stage. If it is the same stage, nothing is transferred.
    """

    kind = Renamed("message_type")

    message_type: MessageType
    micro_batch: int
    chunk: int
    peer: int


def received_message(action: Action, stage: int, placement: Placement) -> Message | None:
    """Return the message that ``action`` on ``stage`` waits for, or None."""
    virtual_stage = placement.virtual_stage(stage, action.chunk)
    if isinstance(action, Forward) and virtual_stage > 0:
        return Message(MessageType.ACTIVATION, action.micro_batch, action.chunk, placement.stage_of(virtual_stage - 1))
    if isinstance(action, GRADIENT_SENDERS) and virtual_stage < placement.num_virtual_stages - 1:
        return Message(MessageType.GRADIENT, action.micro_batch, action.chunk, placement.stage_of(virtual_stage + 1))
    return None


def sent_message(action: Action, stage: int, placement: Placement) -> Message | None:
    """Return the message that ``action`` on ``stage`` sends at its end, or None."""
    virtual_stage = placement.virtual_stage(stage, action.chunk)
    if isinstance(action, Forward) and virtual_stage < placement.num_virtual_stages - 1:
        return Message(MessageType.ACTIVATION, action.micro_batch, action.chunk, placement.stage_of(virtual_stage + 1))
    if isinstance(action, GRADIENT_SENDERS) and virtual_stage > 0:
        return Message(MessageType.GRADIENT, action.micro_batch, action.chunk, placement.stage_of(virtual_stage - 1))
    return None


# Functions that return a stage's actions, and their argument check.

Order = Callable[[int, int, int], list[Action]]
"""Maps (number of stages, number of micro-batches, stage) to that stage's action list."""


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

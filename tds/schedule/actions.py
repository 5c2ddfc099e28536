"""What a stage can do. A schedule is a list of these for each stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work on one micro-batch, for one chunk of layers of the stage."""

    micro_batch: int
    chunk: int = 0


class Forward(Action):
    """Run the layers; the output goes to the next stage, or into the loss on the last."""

    __slots__ = ()


class Backward(Action):
    """Run the whole backward: gradients of the weights, and of the input for the previous stage."""

    __slots__ = ()


class BackwardInput(Action):
    """Run the part of the backward that the previous stage waits for; linear layers put their weights' off."""

    __slots__ = ()


class BackwardWeight(Action):
    """Compute the gradients of weights that the ``BackwardInput`` of this micro-batch and chunk put off."""

    __slots__ = ()

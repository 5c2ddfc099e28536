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

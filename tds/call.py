"""One train_batch or eval_batch, as the stage that works on it sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from tds.batches import BatchSource
from tds.gradients import GradientSource
from tds.loss import LossMeter
from tds.reduction import Reduction
from tds.report import untimed
from tds.schedule import Action, Backward, BackwardWeight


@dataclass
class Call:
    """What a call needs and what it leaves.

    ``reduction`` is None where there are no replicas to add up gradients over, or no gradients.
    """

    source: BatchSource
    is_training: bool
    meter: LossMeter
    loss_fn: Callable[[Any, Any], Any] | None
    gradients: GradientSource | None = None
    reduction: Reduction | None = None
    loss_scale: float = 1.0
    on_micro_batch: Callable[[int], None] | None = None
    on_action: Callable[[Action], None] | None = None
    recomputes_reentrantly: bool = False
    collects_losses: bool = True
    part: Callable[[str], AbstractContextManager[None]] = untimed
    outputs: list[Any] = field(default_factory=list)
    last_output: Any = None


@dataclass
class InFlight:
    """What a forward leaves for its backward: the leaves it read, and where the graph of its output begins.

    The outputs themselves are let go once sent: a gradient edge is enough to run the backward.
    """

    leaves: list[torch.Tensor]
    edges: list[GradientEdge]
    loss: torch.Tensor | None = None


def last_of_chunks(actions: Sequence[Action]) -> set[Action]:
    """Return the actions after which all gradients of their chunk are final."""
    return set({a.chunk: a for a in actions if isinstance(a, (Backward, BackwardWeight))}.values())

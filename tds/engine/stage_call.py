"""State of one ``train_batch`` or ``eval_batch`` on a stage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from tds.bucket_reducer import BucketReducer
from tds.engine.micro_batches import BatchSource
from tds.engine.report import untimed
from tds.gradients import GradientSource
from tds.loss import LossMeter
from tds.schedule import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Message,
    Placement,
    received,
    sent,
)


@dataclass
class Call:
    """Arguments and results of one ``train_batch`` or ``eval_batch``.

    ``reducer`` is None with a single replica or without gradients.
    """

    source: BatchSource
    is_training: bool
    meter: LossMeter
    loss_fn: Callable[[Any, Any], Any] | None
    gradients: GradientSource | None = None
    reducer: BucketReducer | None = None
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
    """State that a forward saves for its backward: its input leaves and the roots of its graph.

    The outputs are freed once they are sent, because their gradient edges are enough to run the backward. On the last
    stage the root is the loss; its gradient is None, which autograd treats as 1.
    """

    leaves: list[torch.Tensor]
    roots: list[Any]


@dataclass(frozen=True)
class Program:
    """Properties derived from the actions of a call on one stage.

    Attributes:
        messages: (received message, sent message) of each action. A forward that reads the data receives None, as does
            the backward of the loss; a forward that computes the loss and the backward of the first layers send None.
        last: the actions after which all gradients of their chunk are final.
        put_off: (micro-batch, chunk) of each backward whose weight gradients are deferred.
        reads: the stage reads micro-batches from the data.
    """

    messages: dict[Action, tuple[Message | None, Message | None]]
    last: frozenset[Action]
    put_off: frozenset[tuple[int, int]]
    reads: bool


@functools.lru_cache(maxsize=16)
def program_of(actions: tuple[Action, ...], stage: int, placement: Placement) -> Program:
    """Return the ``Program`` of ``actions``, cached over calls with the same actions."""
    messages = {action: (received(action, stage, placement), sent(action, stage, placement)) for action in actions}
    last = {a.chunk: a for a in actions if isinstance(a, (Backward, BackwardWeight))}
    put_off = {action_key(action) for action in actions if isinstance(action, BackwardInput)}
    reads = any(None in messages[action] for action in actions if isinstance(action, Forward))
    return Program(messages, frozenset(last.values()), frozenset(put_off), reads)


def action_key(action: Action) -> tuple[int, int]:
    return action.micro_batch, action.chunk

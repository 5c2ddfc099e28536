"""State for one ``train_batch`` or ``eval_batch`` on a stage."""

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
    received_message,
    sent_message,
)


@dataclass
class Call:
    """Arguments and results of one ``train_batch`` or ``eval_batch``.

    Attributes:
        source: reads the micro-batches.
        meter: sums the losses on the last stage.
        gradients: access to the optimizer's gradients; None in evaluation.
        reducer: all-reduces the gradients over the replicas; None with a single replica or without gradients.
        loss_scale: factor of each loss before its backward.
        recomputes_reentrantly: recompute is reentrant, so float inputs of the first stage must require gradients.
        collects_losses: False: the last stage stores the model's outputs and computes no losses.
        time_phase: returns a context that times one part of the step, see ``Report.time_phase``.
        outputs: result of an evaluation: the loss or output of each micro-batch on the last stage.
        last_output: output of the last micro-batch of an evaluation on the last stage.
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
    time_phase: Callable[[str], AbstractContextManager[None]] = untimed
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
        messages: (received message, sent message) of each action. The received message is None for a forward that reads
            data and for the backward of the loss. The sent message is None for a forward that computes the loss and for
            the backward of the model's first layers. Both are None for ``BackwardWeight``.
        last: the actions after which all gradients of their chunk are final.
        deferred_keys: (micro-batch, chunk) of each backward whose weight gradients are deferred.
        reads_data: the stage reads micro-batches from the data.
    """

    messages: dict[Action, tuple[Message | None, Message | None]]
    last: frozenset[Action]
    deferred_keys: frozenset[tuple[int, int]]
    reads_data: bool


@functools.lru_cache(maxsize=16)
def program_of(actions: tuple[Action, ...], stage: int, placement: Placement) -> Program:
    """Derive the ``Program`` of ``actions``, cached over calls with the same actions."""
    messages = {
        action: (received_message(action, stage, placement), sent_message(action, stage, placement))
        for action in actions
    }
    last = {a.chunk: a for a in actions if isinstance(a, (Backward, BackwardWeight))}
    deferred_keys = {action_key(action) for action in actions if isinstance(action, BackwardInput)}
    reads_data = any(None in messages[action] for action in actions if isinstance(action, Forward))
    return Program(messages, frozenset(last.values()), frozenset(deferred_keys), reads_data)


def action_key(action: Action) -> tuple[int, int]:
    return action.micro_batch, action.chunk

"""StepEngine: the interface of the single-stage and the pipeline engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron.config.batch import Share
from megatron.errors import DataError
from megatron.models.common.router import Routers
from megatron.mpu.groups import Grid
from megatron.mpu.random import DropoutStreams
from megatron.optim import MixedPrecisionOptimizer
from megatron.training.step_result import StepResult
from tds.bubble_timer import Row
from tds.engine.data_consistency import DataDisagreement
from tds.loss_reduction import MeanLosses

DataIterator = Iterator[Any] | None
ForwardStep = Callable[[DataIterator, Any], tuple[Any, dict[str, Any]]]


@dataclass(frozen=True)
class StepSettings:
    """What both engines need for a training step.

    Args:
        share: this replica's micro-batches in a step that names no other share, and in an evaluation.
        micro_batch_tokens: predicted tokens of one micro-batch on all replicas together. In the backward, a sum over
            tokens is divided by the nominal weight of a step's tokens.
        averages_micro_batches: train on the mean of the micro-batches' means (--loss-average micro-batch).
        routers: the routers of this rank's layers with experts; None for a dense model.
    """

    grid: Grid
    streams: DropoutStreams
    share: Share
    micro_batch_tokens: int
    averages_micro_batches: bool = False
    routers: Routers | None = None


class StepEngine(Protocol):
    """The interface of an engine to the training loop.

    Attributes:
        engine: a ``ModelEngine``, or the engine of DeepSpeed or tds.
        on_loss: called on every rank with the mean loss of a step, before the update.
        on_activity: called with a description of each action of a step, before the action.
        micro_losses: losses (or sums of losses) of the last step by micro-batch, on the last stage of this replica.
        has_weighted_loss: on the last stage, after the first loss: True if the loss is a pair (sum, count).
    """

    module: torch.nn.Module
    optimizer: MixedPrecisionOptimizer
    on_loss: Callable[[float], None]
    on_activity: Callable[[str], None]
    micro_losses: dict[int, torch.Tensor]
    has_weighted_loss: bool | None
    engine: Any

    def train_step(self, data: DataIterator, step: int, share: Share | None = None) -> StepResult: ...

    def evaluate_batch(self, data: DataIterator) -> float: ...

    def bubble(self) -> float | None: ...

    def busy(self) -> tuple[float, int]: ...

    def use_deepspeed(self) -> None: ...


def set_micro_batches(engine: Any, number: int) -> None:
    """Set the number of micro-batches of the next step on an engine with DeepSpeed's interface."""
    now = engine.gradient_accumulation_steps()
    if number != now:
        engine.set_train_batch_size(engine.train_batch_size() // now * number)


@contextmanager
def as_data_error() -> Iterator[None]:
    """Raise the disagreement that ``--check-data-agreement`` finds, the same on all ranks, as a DataError."""
    try:
        yield
    except DataDisagreement as error:
        raise DataError(str(error)) from error


def loss_values(means: MeanLosses) -> tuple[float, dict[str, float]]:
    """Return the mean loss and the other losses by name, as floats."""
    (_, loss), *others = means.numbers.items()
    return loss, dict(others)


def busy_seconds(rows: list[Row]) -> tuple[float, int]:
    """Return the seconds of work in the recorded steps, without waits for other stages, and the number of steps."""
    return 1e-9 * sum(ended - began - waited for began, ended, waited in rows), len(rows)

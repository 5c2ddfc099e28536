"""StepEngine: the common interface of the single-stage and the pipeline engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron.config.batch import Share
from megatron.errors import DataError
from megatron.models.common.qk_clip import AttentionLogits
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
    """Training step settings for both engines.

    Args:
        share: this replica's micro-batches in an evaluation, and in a step that specifies no other share.
        micro_batch_tokens: predicted tokens in one micro-batch, summed over all replicas. Determines the gradient
            divisor (``loss_forms.nominal_weight``).
        averages_micro_batches: train on the mean of micro-batch means (--loss-average micro-batch).
        routers: routers in this rank's MoE layers; None for a dense model.
        logits: measures the attention logits of this rank's layers; None if they are not needed.
        shares_quantized_weights: the micro-batches of a step share the weights that are quantized to FP8.
    """

    grid: Grid
    streams: DropoutStreams
    share: Share
    micro_batch_tokens: int
    averages_micro_batches: bool = False
    routers: Routers | None = None
    logits: AttentionLogits | None = None
    shares_quantized_weights: bool = False


class StepEngine(Protocol):
    """Interface between an engine and the training loop.

    Attributes:
        engine: a ``ModelEngine``, or a DeepSpeed or tds engine.
        on_loss: called on every rank with a step's mean loss, before the update.
        on_activity: called with a description of each action in a step before the action starts.
        micro_losses: losses (or loss sums) in the last step by micro-batch, on this replica's last stage.
        has_weighted_loss: True if the loss is a pair (sum, count); set on the last stage after the first loss.
        logits: measures the attention logits of each step; None if they are not needed.
    """

    module: torch.nn.Module
    optimizer: MixedPrecisionOptimizer
    on_loss: Callable[[float], None]
    on_activity: Callable[[str], None]
    micro_losses: dict[int, torch.Tensor]
    has_weighted_loss: bool | None
    logits: AttentionLogits | None
    engine: Any

    def train_step(self, data: DataIterator, step: int, share: Share | None = None) -> StepResult:
        """Run this replica's micro-batches in one step and update the weights. Collective."""
        ...

    def evaluate_batch(self, data: DataIterator) -> float:
        """Compute the mean loss on one global batch, without dropout. Collective."""
        ...

    def bubble(self) -> float | None:
        """Return the stages' idle fraction since the last call; None without a pipeline. Collective."""
        ...

    def busy(self) -> tuple[float, int]:
        """Return (compute seconds, steps) since the last call."""
        ...

    def use_deepspeed(self) -> None:
        """Switch to an engine that reads and writes DeepSpeed checkpoints. Collective."""
        ...


def set_micro_batches(engine: Any, num_requested: int) -> None:
    """Set the micro-batch count for the next step on an engine with the DeepSpeed interface."""
    num_micro_batches = engine.gradient_accumulation_steps()
    if num_requested != num_micro_batches:
        engine.set_train_batch_size(engine.train_batch_size() // num_micro_batches * num_requested)


@contextmanager
def as_data_error() -> Iterator[None]:
    """Re-raise a disagreement found by ``--check-data-agreement`` as a DataError, the same on all ranks."""
    try:
        yield
    except DataDisagreement as error:
        raise DataError(str(error)) from error


def loss_values(means: MeanLosses) -> tuple[float, dict[str, float]]:
    """Return the mean loss and the other losses by name, as floats."""
    (_, loss), *other_losses = means.values.items()
    return loss, dict(other_losses)


def busy_seconds(rows: list[Row]) -> tuple[float, int]:
    """Return (compute seconds in the recorded steps, without waits for other stages; step count)."""
    return 1e-9 * sum(ended - began - waited for began, ended, waited in rows), len(rows)

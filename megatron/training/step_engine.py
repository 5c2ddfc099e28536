"""StepEngine: the interface of the single-stage and the pipeline engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from megatron.config.batch import Share
from megatron.errors import DataError
from megatron.optim import MixedPrecisionOptimizer
from megatron.training.step_result import StepResult
from tds.bubble_timer import Row
from tds.engine.data_consistency import DataDisagreement
from tds.loss_reduction import MeanLosses

DataIterator = Iterator[Any] | None


ForwardStep = Callable[[DataIterator, Any], tuple[Any, dict[str, Any]]]


class StepEngine(Protocol):
    """What the loop needs of an engine.

    Attributes:
        engine: DeepSpeed's or tds's.
        on_loss: called on every rank with the mean loss of a step, ahead of its update.
        on_activity: called with what the engine is at, ahead of each action of a step.
        micro_losses: of the last step, this rank's own losses (or sums of losses) by micro-batch, on the last stage.
        has_weighted_loss: on the last stage, as soon as there was a loss: whether it is a pair (sum, count).
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


def set_micro_batches(engine: Any, number: int) -> None:
    """Tell an engine of DeepSpeed's kind how many micro-batches its next step has."""
    now = engine.gradient_accumulation_steps()
    if number != now:
        engine.set_train_batch_size(engine.train_batch_size() // now * number)


@contextmanager
def _raising_data_error() -> Iterator[None]:
    """Turn what ``--check-data-agreement`` finds, the same on all ranks, into the error of data that cannot be used."""
    try:
        yield
    except DataDisagreement as error:
        raise DataError(str(error)) from error


def _loss_values(means: MeanLosses) -> tuple[float, dict[str, float]]:
    """Return the mean loss and the others by name, as numbers of the host."""
    (_, loss), *others = means.numbers.items()
    return loss, dict(others)


def _own_work(rows: list[Row]) -> tuple[float, int]:
    return 1e-9 * sum(ended - began - waited for began, ended, waited in rows), len(rows)

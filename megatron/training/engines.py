"""One optimizer step and one evaluation, on either engine: DeepSpeed's without a pipeline, ours with one.

Both leave the same thing behind: gradients that are the mean over the valid tokens of the global batch (or over
micro-batches, for a loss that is a plain scalar), summed over the replicas, then one ``optimizer.step()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron.errors import NumericsError
from megatron.mpu.groups import Grid
from megatron.mpu.random import DropoutStreams, Position
from megatron.optim import MixedPrecisionOptimizer
from tds import reduce_gradients
from tds.agreement import Agreement, agree_on_loss
from tds.loss import LossMeter, Weighted

DataIterator = Iterator[Any] | None
ForwardStep = Callable[[DataIterator, Any], tuple[Any, dict[str, Any]]]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave, the same on every rank."""

    loss: float
    grad_norm: float
    loss_scale: float
    is_skipped: bool
    losses: dict[str, float] = field(default_factory=dict)


class StepEngine(Protocol):
    """What the loop needs of an engine."""

    module: torch.nn.Module
    optimizer: MixedPrecisionOptimizer

    def train_step(self, data: DataIterator, step: int, num_micro_batches: int | None = None) -> StepResult: ...

    def evaluate_batch(self, data: DataIterator) -> float: ...

    def bubble(self) -> float | None: ...


def nominal_weight(tokens_per_step: int) -> float:
    """Return the power of two nearest to the tokens of a step.

    Gradients are accumulated divided by it, which keeps fp16 in range and changes no other bit.
    """
    return 2.0 ** round(math.log2(max(tokens_per_step, 1)))


def set_micro_batches(engine: Any, number: int) -> None:
    """Tell an engine of DeepSpeed's kind how many micro-batches its next step has."""
    now = engine.gradient_accumulation_steps()
    if number != now:
        engine.set_train_batch_size(engine.train_batch_size() // now * number)


class SingleStageEngine:
    """DeepSpeed's engine: forward and backward of each micro-batch in turn; reduction, norm and clipping are ours."""

    def __init__(
        self,
        engine: Any,
        forward_step: ForwardStep,
        *,
        grid: Grid,
        streams: DropoutStreams,
        num_micro_batches: int,
        micro_batch_tokens: int,
    ) -> None:
        """Take over ``engine``.

        Args:
            num_micro_batches: of a step for which nothing else is said, and of an evaluation.
            micro_batch_tokens: that a loss may be a sum over, of a micro-batch on all replicas together. The nominal
                weight of a step's tokens divides the sums of pairs in backward (a scalar: the micro-batches).
        """
        self.engine = engine
        self.module: torch.nn.Module = engine.module
        self.optimizer: MixedPrecisionOptimizer = engine.optimizer
        self.forward_step = forward_step
        self.grid, self.streams = grid, streams
        self.num_micro_batches, self.micro_batch_tokens = num_micro_batches, micro_batch_tokens
        self.device = torch.device(engine.device)
        engine.enable_backward_allreduce = False

    def train_step(self, data: DataIterator, step: int, num_micro_batches: int | None = None) -> StepResult:
        """Run all micro-batches of step number ``step`` and update the weights. Collective."""
        number = num_micro_batches or self.num_micro_batches
        set_micro_batches(self.engine, number)
        self.engine.train()
        reported: dict[str, torch.Tensor] = {}
        nominal = nominal_weight(self.micro_batch_tokens * number)
        meter = LossMeter(number, nominal, self.device, lambda: reported)
        self.engine.set_gradient_accumulation_boundary(False)
        for micro_batch in range(number):
            self.streams.position = Position(step, micro_batch)
            loss, report = self.forward_step(data, self.engine)
            reported = _numbers(report, loss)
            share = meter.add(as_weighted(loss), micro_batch)
            self.engine.backward(share * self.optimizer.loss_scale, scale_wrt_gas=False)
        agreement = self._agree(meter)
        self._reduce(agreement.factor)
        means = agreement.means()
        return self._update(means.loss.item(), {name: mean.item() for name, mean in means.additional.items()})

    @torch.no_grad()
    def evaluate_batch(self, data: DataIterator) -> float:
        """Return the mean loss of one global batch, without dropout and without touching training. Collective."""
        self.engine.eval()
        nominal = nominal_weight(self.micro_batch_tokens * self.num_micro_batches)
        meter = LossMeter(self.num_micro_batches, nominal, self.device)
        for micro_batch in range(self.num_micro_batches):
            loss, _ = self.forward_step(data, self.engine)
            meter.add(as_weighted(loss), micro_batch)
        self.engine.train()
        return self._agree(meter).means().loss.item()

    def bubble(self) -> None:
        """Return None: a single stage waits for no other."""

    def _reduce(self, factor: float) -> None:
        """Sum the gradients over the replicas, times ``factor``, which a single replica leaves to the optimizer."""
        if self.grid.data.size == 1:
            self.optimizer.gradient_factor = factor
        else:
            reduce_gradients([g for _, g in self.optimizer.gradients()], self.grid.data.handle, factor)

    def _agree(self, meter: LossMeter) -> Agreement:
        """Return what the losses of all replicas came to. Collective."""
        data = self.grid.data
        return agree_on_loss(
            meter,
            data_group=data.handle,
            data_size=data.size,
            pipe_group=None,
            pipe_size=1,
            last_rank=self.grid.rank,
            device=self.device,
        )

    def _update(self, loss: float, losses: dict[str, float]) -> StepResult:
        scale = self.optimizer.loss_scale
        raise_unless_finite(loss, self.optimizer)
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        return StepResult(
            loss=loss,
            grad_norm=self.optimizer._global_grad_norm,
            loss_scale=scale,
            is_skipped=self.optimizer.overflow,
            losses=losses,
        )


class PipelineEngine:
    """``tds``: the same step with the model's layers on several stages."""

    def __init__(
        self, engine: Any, *, streams: DropoutStreams, num_micro_batches: int, micro_batch_tokens: int
    ) -> None:
        """As ``SingleStageEngine``."""
        self.engine = engine
        self.module: torch.nn.Module = engine.module
        self.optimizer: MixedPrecisionOptimizer = engine.optimizer
        self.streams = streams
        self.num_micro_batches, self.micro_batch_tokens = num_micro_batches, micro_batch_tokens
        self._step = 0
        engine.nominal_weight = nominal_weight(micro_batch_tokens * num_micro_batches)
        engine.module.loss_fn = _reading_pairs(engine.module.loss_fn)
        engine.on_micro_batch = self._start_micro_batch
        engine.on_loss = lambda loss: raise_unless_finite(float(loss), self.optimizer)

    def train_step(self, data: DataIterator, step: int, num_micro_batches: int | None = None) -> StepResult:
        """Run all micro-batches of step number ``step`` through the stages and update the weights. Collective."""
        number = num_micro_batches or self.num_micro_batches
        set_micro_batches(self.engine, number)
        self.engine.nominal_weight = nominal_weight(self.micro_batch_tokens * number)
        self._step = step
        scale = self.optimizer.loss_scale
        loss = float(self.engine.train_batch(data))
        return StepResult(
            loss=loss,
            grad_norm=self.optimizer._global_grad_norm,
            loss_scale=scale,
            is_skipped=self.optimizer.overflow,
            losses={name: float(mean) for name, mean in (self.engine.agg_additional_losses or {}).items()},
        )

    @torch.no_grad()
    def evaluate_batch(self, data: DataIterator) -> float:
        """Return the mean loss of one global batch, without dropout and without touching training. Collective."""
        means = self.engine.eval_batch(data, num_micro_batches=self.num_micro_batches)
        return float(next(iter(means.values())) if isinstance(means, dict) else means)

    def bubble(self) -> float | None:
        """Return the share of time that stages idled in the training steps since the last call. Collective.

        None if there was no step.
        """
        share: float | None = self.engine.bubble()
        return share

    def _start_micro_batch(self, micro_batch: int) -> None:
        self.streams.position = Position(self._step, micro_batch)


def raise_unless_finite(loss: float, optimizer: MixedPrecisionOptimizer) -> None:
    """Raise NumericsError for a loss that is not finite where no loss scale can be at fault."""
    if not math.isfinite(loss) and not optimizer.scaler.is_dynamic:
        raise NumericsError(f"the loss must be finite, got {loss}. Lower --lr, or look at the batch.")


def as_weighted(loss: Any) -> Any:
    """Return a plain pair (sum, count), as users of Megatron write it, as what ``tds`` calls ``Weighted``."""
    is_pair = isinstance(loss, (tuple, list)) and not hasattr(loss, "_fields") and len(loss) == 2
    return Weighted(*loss) if is_pair else loss


def _reading_pairs(loss_fn: Callable[[Any, Any], Any] | None) -> Callable[[Any, Any], Any]:
    return lambda output, labels: as_weighted(output if loss_fn is None else loss_fn(output, labels))


def _numbers(report: dict[str, Any], loss: Any) -> dict[str, torch.Tensor]:
    """Return what is to be averaged of a report: tensors of one element; the loss itself is reported apart."""
    return {
        name: value
        for name, value in report.items()
        if value is not loss and isinstance(value, torch.Tensor) and value.numel() == 1
    }

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
from megatron.mpu.mappings import all_reduce
from megatron.mpu.random import DropoutStreams, Position
from megatron.optim import MixedPrecisionOptimizer
from tds import reduce_gradients
from tds.loss import LossMeter, agree_on_loss

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

    def train_step(self, data: DataIterator, step: int) -> StepResult: ...

    def evaluate_batch(self, data: DataIterator) -> float: ...


def nominal_weight(tokens_per_step: int) -> float:
    """Return the power of two nearest to the tokens of a step.

    Gradients are accumulated divided by it, which keeps fp16 in range and changes no other bit.
    """
    return 2.0 ** round(math.log2(max(tokens_per_step, 1)))


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
        nominal: float,
    ) -> None:
        """Take over ``engine``; ``nominal`` divides the sums of pairs in backward (a scalar: the micro-batches)."""
        self.engine = engine
        self.module: torch.nn.Module = engine.module
        self.optimizer: MixedPrecisionOptimizer = engine.optimizer
        self.forward_step = forward_step
        self.grid, self.streams = grid, streams
        self.num_micro_batches, self.nominal = num_micro_batches, nominal
        self.device = torch.device(engine.device)
        engine.enable_backward_allreduce = False

    def train_step(self, data: DataIterator, step: int) -> StepResult:
        """Run all micro-batches of step number ``step`` and update the weights. Collective."""
        self.engine.train()
        meter = LossMeter(self.num_micro_batches, self.nominal, self.device)
        reported: dict[str, torch.Tensor] = {}
        self.engine.set_gradient_accumulation_boundary(False)
        for micro_batch in range(self.num_micro_batches):
            self.streams.position = Position(step, micro_batch)
            loss, report = self.forward_step(data, self.engine)
            share = meter.add(loss, micro_batch)
            self.engine.backward(share * self.optimizer.loss_scale, scale_wrt_gas=False)
            _add_report(reported, report, loss)
        mean, factor = self._agree(meter)
        reduce_gradients([g for _, g in self.optimizer.gradients()], self.grid.data.handle, float(factor))
        return self._update(mean.item(), self._means(reported))

    @torch.no_grad()
    def evaluate_batch(self, data: DataIterator) -> float:
        """Return the mean loss of one global batch, without dropout and without touching training. Collective."""
        self.engine.eval()
        meter = LossMeter(self.num_micro_batches, self.nominal, self.device)
        for micro_batch in range(self.num_micro_batches):
            loss, _ = self.forward_step(data, self.engine)
            meter.add(loss, micro_batch)
        self.engine.train()
        return self._agree(meter)[0].item()

    def _agree(self, meter: LossMeter) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (mean loss of all replicas, factor for their summed gradients). Collective."""
        data = self.grid.data
        return agree_on_loss(
            meter.local_numbers(),
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

    def _means(self, reported: dict[str, torch.Tensor]) -> dict[str, float]:
        """Average named losses over micro-batches and replicas."""
        if not reported:
            return {}
        values = torch.stack([value.double() for value in reported.values()])
        all_reduce(values, self.grid.data)
        count = self.num_micro_batches * self.grid.data.size
        return dict(zip(reported, (values / count).tolist(), strict=True))


class PipelineEngine:
    """``tds``: the same step with the model's layers on several stages."""

    def __init__(self, engine: Any, *, streams: DropoutStreams, num_micro_batches: int, nominal: float) -> None:
        self.engine = engine
        self.module: torch.nn.Module = engine.module
        self.optimizer: MixedPrecisionOptimizer = engine.optimizer
        self.streams = streams
        self.num_micro_batches = num_micro_batches
        self._step = 0
        engine.nominal_weight = nominal
        engine.on_micro_batch = self._start_micro_batch
        engine.on_loss = lambda loss: raise_unless_finite(float(loss), self.optimizer)

    def train_step(self, data: DataIterator, step: int) -> StepResult:
        """Run all micro-batches of step number ``step`` through the stages and update the weights. Collective."""
        self._step = step
        scale = self.optimizer.loss_scale
        loss = float(self.engine.train_batch(data))
        return StepResult(
            loss=loss,
            grad_norm=self.optimizer._global_grad_norm,
            loss_scale=scale,
            is_skipped=self.optimizer.overflow,
        )

    @torch.no_grad()
    def evaluate_batch(self, data: DataIterator) -> float:
        """Return the mean loss of one global batch, without dropout and without touching training. Collective."""
        return float(self.engine.eval_batch(data, num_micro_batches=self.num_micro_batches))

    def _start_micro_batch(self, micro_batch: int) -> None:
        self.streams.position = Position(self._step, micro_batch)


def raise_unless_finite(loss: float, optimizer: MixedPrecisionOptimizer) -> None:
    """Raise NumericsError for a loss that is not finite where no loss scale can be at fault."""
    if not math.isfinite(loss) and not optimizer.scaler.is_dynamic:
        raise NumericsError(f"the loss must be finite, got {loss}. Lower --lr, or look at the batch.")


def _add_report(reported: dict[str, torch.Tensor], report: dict[str, Any], loss: Any) -> None:
    """Add named losses of one micro-batch; the loss itself is reported apart."""
    for name, value in report.items():
        if value is loss or not isinstance(value, torch.Tensor) or value.numel() != 1:
            continue
        reported[name] = reported.get(name, torch.zeros((), device=value.device)) + value.detach()

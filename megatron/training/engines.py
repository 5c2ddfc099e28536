"""One optimizer step and one evaluation, on either engine: DeepSpeed's without a pipeline, ours with one.

Both leave the same thing behind: gradients that are the mean over the valid tokens of the global batch (or over
micro-batches, for a loss that is a plain scalar), summed over the replicas, then one ``optimizer.step()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from megatron.errors import DataError
from megatron.mpu.groups import Grid
from megatron.mpu.random import DropoutStreams, Position
from megatron.optim import MixedPrecisionOptimizer
from megatron.training.losses import as_weighted, reading_pairs, scalars
from megatron.training.step_result import FiniteOnly, StepResult, result_of
from tds import reduce_gradients
from tds.agreement import Agreement, Means, agree_on_loss
from tds.batches import read_ahead
from tds.bubble import BubbleMeter, Row
from tds.clock import clock_for
from tds.data_agreement import DataDisagreement
from tds.device import random_numbers_kept
from tds.loss import LossMeter, has_loss_function, is_weighted, named_losses
from tds.train_step import read_with_norm

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

    def train_step(self, data: DataIterator, step: int, num_micro_batches: int | None = None) -> StepResult: ...

    def evaluate_batch(self, data: DataIterator) -> float: ...

    def bubble(self) -> float | None: ...

    def busy(self) -> tuple[float, int]: ...


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
        self.on_loss: Callable[[float], None] = FiniteOnly(self.optimizer).take_loss
        self.on_activity: Callable[[str], None] = lambda text: None
        self.micro_losses: dict[int, torch.Tensor] = {}
        self.has_weighted_loss: bool | None = None
        self._clock = clock_for(self.device)
        self._busy = BubbleMeter(self._clock)
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
        self.micro_losses.clear()
        began = self._clock.mark()
        for micro_batch in range(number):
            self.streams.position = Position(step, micro_batch, number)
            self.on_activity(f"step {step + 1}, forward of micro-batch {micro_batch}")
            loss, report = self.forward_step(data, self.engine)
            reported = scalars(report, loss)
            share = meter.add(as_weighted(loss), micro_batch)
            self.has_weighted_loss = meter.is_weighted
            self.micro_losses[micro_batch] = share.detach()
            self.on_activity(f"step {step + 1}, backward of micro-batch {micro_batch}")
            if micro_batch == number - 1:
                self.optimizer.begin_last_backward()
            self.engine.backward(share * self.optimizer.loss_scale, scale_wrt_gas=False)
            self.optimizer.end_micro_batch()
        self._busy.note(began, self._clock.mark(), [])
        self.on_activity(f"step {step + 1}, reduction and update")
        agreement = self._agree(meter)
        self._sum_over_replicas()
        read_ahead(data)
        read_with_norm(self.optimizer, agreement)
        return self._update(*_told(agreement.means()))

    @torch.no_grad()
    def evaluate_batch(self, data: DataIterator) -> float:
        """Return the mean loss of one global batch, without dropout and without touching training. Collective."""
        self.engine.eval()
        nominal = nominal_weight(self.micro_batch_tokens * self.num_micro_batches)
        meter = LossMeter(self.num_micro_batches, nominal, self.device)
        with random_numbers_kept(self.device):  # a user's layers and samples may draw some
            for micro_batch in range(self.num_micro_batches):
                loss, _ = self.forward_step(data, self.engine)
                meter.add(as_weighted(loss), micro_batch)
        self.engine.train()
        return _told(self._agree(meter).means())[0]

    def bubble(self) -> None:
        """Return None: a single stage waits for no other."""

    def busy(self) -> tuple[float, int]:
        """Return the seconds of own work since the last call, waits for the tensor group included, and the steps."""
        return _own_work(self._busy.drain())

    def _sum_over_replicas(self) -> None:
        """Have the sums of the gradients over the replicas; what they are multiplied by is left to the optimizer."""
        if self.optimizer.sums_gradients:
            self.optimizer.scale_gradients(1.0)
        elif self.grid.data.size > 1:
            reduce_gradients([g for _, g in self.optimizer.gradients()], self.grid.data.handle)

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
        self.on_loss(loss)
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        return result_of(loss, scale, self.optimizer, losses)


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
        self._step, self._number, self._micro_batch = 0, num_micro_batches, 0
        self.micro_losses: dict[int, torch.Tensor] = {}
        self.has_weighted_loss: bool | None = None
        self.on_loss: Callable[[float], None] = FiniteOnly(self.optimizer).take_loss
        self.on_activity: Callable[[str], None] = lambda text: None
        engine.agrees_on_data = False  # ReplicaBatches never end
        engine.nominal_weight = nominal_weight(micro_batch_tokens * num_micro_batches)
        engine.module.loss_fn = self._noting(reading_pairs(engine.module.loss_fn))
        engine.on_micro_batch = self._start_micro_batch
        engine.on_action = lambda action: self.on_activity(f"step {self._step + 1}, {action}")
        engine.on_loss = lambda _: self.on_loss(_told(engine.means)[0])

    def train_step(self, data: DataIterator, step: int, num_micro_batches: int | None = None) -> StepResult:
        """Run all micro-batches of step number ``step`` through the stages and update the weights. Collective."""
        number = num_micro_batches or self.num_micro_batches
        set_micro_batches(self.engine, number)
        self.engine.nominal_weight = nominal_weight(self.micro_batch_tokens * number)
        self._step, self._number = step, number
        self.micro_losses.clear()
        scale = self.optimizer.loss_scale
        with _told_as_data_error():
            self.engine.train_batch(data)
        loss, losses = _told(self.engine.means)
        return result_of(loss, scale, self.optimizer, losses)

    @torch.no_grad()
    def evaluate_batch(self, data: DataIterator) -> float:
        """Return the mean loss of one global batch, without dropout and without touching training. Collective."""
        with _told_as_data_error():
            means = self.engine.eval_batch(data, num_micro_batches=self.num_micro_batches)
        return float(next(iter(means.values())) if isinstance(means, dict) else means)

    def bubble(self) -> float | None:
        """Return the share of time that stages idled in the training steps since the last call. Collective.

        None if there was no step.
        """
        share: float | None = self.engine.bubble()
        return share

    def busy(self) -> tuple[float, int]:
        """Return the seconds of own work since the last call, waits for other stages left out, and the steps."""
        return _own_work(self.engine.rows_of_steps("busy"))

    def _start_micro_batch(self, micro_batch: int) -> None:
        self._micro_batch = micro_batch
        self.streams.position = Position(self._step, micro_batch, self._number)

    def _noting(self, loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return ``loss_fn`` that also keeps what each micro-batch of a step gave."""

        def noted(output: Any, labels: Any) -> Any:
            loss = loss_fn(output, labels)
            if torch.is_grad_enabled():
                trained = next(iter(named_losses(loss, self._micro_batch).values()))
                self.has_weighted_loss = is_weighted(trained)
                self.micro_losses[self._micro_batch] = torch.as_tensor(getattr(trained, "total", trained)).detach()
            return loss

        noted.is_identity = not has_loss_function(loss_fn)  # type: ignore[attr-defined]
        return noted


@contextmanager
def _told_as_data_error() -> Iterator[None]:
    """Turn what ``--check-data-agreement`` finds, the same on all ranks, into the error of data that cannot be used."""
    try:
        yield
    except DataDisagreement as error:
        raise DataError(str(error)) from error


def _told(means: Means) -> tuple[float, dict[str, float]]:
    """Return the mean loss and the others by name, as numbers of the host."""
    (_, loss), *others = means.numbers.items()
    return loss, dict(others)


def _own_work(rows: list[Row]) -> tuple[float, int]:
    return 1e-9 * sum(ended - began - waited for began, ended, waited in rows), len(rows)

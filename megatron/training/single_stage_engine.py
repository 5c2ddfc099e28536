"""SingleStageEngine: one training step and one evaluation without a pipeline.

Both leave the same thing behind: gradients that are the mean over the valid tokens of the global batch (or over
micro-batches, for a loss that is a plain scalar and with --loss-average micro-batch), summed over the replicas, then
one ``optimizer.step()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.config.batch import Share
from megatron.models.common.router import Routers
from megatron.mpu.groups import Grid
from megatron.mpu.random import DropoutKey, DropoutStreams
from megatron.optim import MixedPrecisionOptimizer
from megatron.training.loss_forms import (
    as_weighted,
    mean_of_micro_batch,
    nominal_weight,
    scalars,
    token_weight,
    with_router_losses,
)
from megatron.training.step_engine import (
    DataIterator,
    ForwardStep,
    _loss_values,
    _own_work,
    set_micro_batches,
)
from megatron.training.step_result import FiniteLossCheck, StepResult, result_of
from tds import reduce_gradients
from tds.bubble_timer import BubbleTimer
from tds.clocks import clock_for
from tds.device import random_numbers_kept
from tds.engine.micro_batches import read_ahead
from tds.gradients import is_reduced_apart
from tds.loss import LossMeter
from tds.loss_reduction import LossReduction, all_reduce_loss, read_with_norm


class SingleStageEngine:
    """DeepSpeed's engine: forward and backward of each micro-batch in turn; reduction, norm and clipping are ours."""

    def __init__(
        self,
        engine: Any,
        forward_step: ForwardStep,
        *,
        grid: Grid,
        streams: DropoutStreams,
        share: Share,
        micro_batch_tokens: int,
        averages_micro_batches: bool = False,
        routers: Routers | None = None,
    ) -> None:
        """Take over ``engine``.

        Args:
            share: this replica's of a step for which nothing else is said, and of an evaluation.
            micro_batch_tokens: that a loss may be a sum over, of a micro-batch on all replicas together. The nominal
                weight of a step's tokens divides the sums of pairs in backward (a scalar: the micro-batches).
            averages_micro_batches: train on the mean of the micro-batches' means (``mean_of_micro_batch``).
            routers: of this rank's layers with experts; None: the model is dense.
        """
        self.engine = engine
        self.module: torch.nn.Module = engine.module
        self.optimizer: MixedPrecisionOptimizer = engine.optimizer
        self.forward_step = forward_step
        self.grid, self.streams = grid, streams
        self.share, self.micro_batch_tokens = share, micro_batch_tokens
        self.averages_micro_batches = averages_micro_batches
        self.routers = routers
        self.device = torch.device(engine.device)
        self.on_loss: Callable[[float], None] = FiniteLossCheck(self.optimizer).take_loss
        self.on_activity: Callable[[str], None] = lambda text: None
        self.micro_losses: dict[int, torch.Tensor] = {}
        self.has_weighted_loss: bool | None = None
        self._clock = clock_for(self.device)
        self._busy = BubbleTimer(self._clock)
        engine.enable_backward_allreduce = False

    def train_step(self, data: DataIterator, step: int, share: Share | None = None) -> StepResult:
        """Run this replica's micro-batches of step number ``step`` and update the weights. Collective."""
        first, number, mean = share or self.share
        set_micro_batches(self.engine, number)
        self.engine.train()
        reported: dict[str, torch.Tensor] = {}
        meter = LossMeter(number, nominal_weight(self.micro_batch_tokens * mean), self.device, lambda: reported, mean)
        self.engine.set_gradient_accumulation_boundary(False)
        self.micro_losses.clear()
        sums_gradients = self.optimizer.sums_gradients
        works_in_backward = sums_gradients or self.optimizer.gathers_weights
        began = self._clock.mark()
        for micro_batch in range(number):
            self.streams.position = DropoutKey(step, micro_batch, first)
            self.on_activity(f"step {step + 1}, forward of micro-batch {micro_batch}")
            loss, report = self.forward_step(data, self.engine)
            reported = scalars(report, loss)
            loss = as_weighted(loss)
            loss = mean_of_micro_batch(loss) if self.averages_micro_batches else loss
            trained = meter.add(loss, micro_batch)
            self.has_weighted_loss = next(iter(meter.sums.values())).is_weighted
            self.micro_losses[micro_batch] = trained.detach()
            if self.routers is not None:
                self._scale_routers(self.routers, mean)
            self.on_activity(f"step {step + 1}, backward of micro-batch {micro_batch}")
            if works_in_backward and micro_batch == number - 1:
                self.optimizer.begin_last_backward()
            self.engine.backward(trained * self.optimizer.loss_scale, scale_wrt_gas=False)
            if works_in_backward:
                self.optimizer.end_micro_batch()
        self._busy.note(began, self._clock.mark(), [])
        self.on_activity(f"step {step + 1}, reduction and update")
        agreement = self._agree(meter)
        if sums_gradients:
            self.optimizer.scale_gradients(1.0)
        elif self.grid.data_context.size > 1:  # what sums are multiplied by is left to the optimizer
            gradients = [gradient for p, gradient in self.optimizer.gradients() if not is_reduced_apart(p)]
            reduce_gradients(gradients, self.grid.data_context.handle)
        read_ahead(data)
        read_with_norm(self.optimizer, agreement)
        return self._update(*_loss_values(agreement.means()))

    @torch.no_grad()
    def evaluate_batch(self, data: DataIterator) -> float:
        """Return the mean loss of one global batch, without dropout and without touching training. Collective."""
        self.engine.eval()
        nominal = nominal_weight(self.micro_batch_tokens * self.share.mean)
        meter = LossMeter(self.share.number, nominal, self.device, mean_micro_batches=self.share.mean)
        with random_numbers_kept(self.device):  # a user's layers and samples may draw some
            for micro_batch in range(self.share.number):
                loss, _ = self.forward_step(data, self.engine)
                meter.add(as_weighted(loss), micro_batch)
        self.engine.train()
        return _loss_values(self._agree(meter).means())[0]

    def bubble(self) -> None:
        """Return None: a single stage waits for no other."""

    def busy(self) -> tuple[float, int]:
        """Return the seconds of own work since the last call, waits for the tensor group included, and the steps."""
        return _own_work(self._busy.drain())

    def _scale_routers(self, routers: Routers, mean_micro_batches: float) -> None:
        """Scale the router losses of a token by the weight that its cross entropy has in the backward.

        Args:
            mean_micro_batches: of a step, averaged over the replicas.
        """
        weight = token_weight(
            self.micro_batch_tokens * mean_micro_batches, self.grid, is_mean=not self.has_weighted_loss
        )
        routers.set_scale(self.optimizer.loss_scale / weight)

    def _agree(self, meter: LossMeter) -> LossReduction:
        """Return what the losses of all replicas, and of their pieces of sequences, came to. Collective."""
        data = self.grid.data_context
        return all_reduce_loss(meter, self.device, data_group=data.handle, data_size=data.size)

    def _update(self, loss: float, losses: dict[str, float]) -> StepResult:
        scale = self.optimizer.loss_scale
        self.on_loss(loss)
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        result = result_of(loss, losses, scale, self.optimizer)
        return result if self.routers is None else with_router_losses(result, self.routers, self.optimizer, self.device)

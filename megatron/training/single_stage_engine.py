"""SingleStageEngine: one training step and one evaluation without a pipeline.

As in ``pipeline_engine``, the loss is averaged over the valid tokens of the global batch (over micro-batches for a
scalar loss or with --loss-average micro-batch). Its gradient is all-reduced over the replicas, followed by one
``optimizer.step()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.config.batch import Share
from megatron.mpu.fp8_weights import sharing_quantized_weights
from megatron.mpu.random import DropoutKey
from megatron.optim import MixedPrecisionOptimizer
from megatron.training.loss_forms import (
    as_weighted,
    mean_of_micro_batch,
    nominal_weight,
    scalars,
    token_weight,
    with_router_losses,
)
from megatron.training.model_engine import COUNTERS, ModelEngine
from megatron.training.step_engine import (
    DataIterator,
    ForwardStep,
    StepSettings,
    busy_seconds,
    loss_values,
    set_micro_batches,
)
from megatron.training.step_result import FiniteLossCheck, StepResult, make_step_result
from tds.bubble_timer import BubbleTimer
from tds.clocks import clock_for
from tds.device import preserve_rng_states
from tds.engine.micro_batches import read_ahead
from tds.loss import LossMeter
from tds.loss_reduction import LossReduction, all_reduce_loss, read_with_norm


class SingleStageEngine:
    """Training step for a model without a pipeline.

    A ``ModelEngine`` or the DeepSpeed engine runs ``backward`` and ``step``. ``MixedPrecisionOptimizer`` reduces and
    clips the gradients and scales the loss.
    """

    def __init__(
        self, engine: Any, forward_step: ForwardStep, settings: StepSettings, make_deepspeed_engine: Callable[[], Any]
    ) -> None:
        """Set up the engine for training.

        Args:
            engine: a ``ModelEngine``, or the DeepSpeed engine.
            forward_step: user's function: (data iterator, engine) -> (loss, values to report).
            make_deepspeed_engine: returns a DeepSpeed engine for the same model and optimizer. Collective.
        """
        self.forward_step = forward_step
        self.grid, self.streams = settings.grid, settings.streams
        self.share, self.micro_batch_tokens = settings.share, settings.micro_batch_tokens
        self.averages_micro_batches, self.routers = settings.averages_micro_batches, settings.routers
        self.logits, self.shares_quantized_weights = settings.logits, settings.shares_quantized_weights
        self._make_deepspeed_engine = make_deepspeed_engine
        self._set_engine(engine)
        self.device = torch.device(engine.device)
        self.on_loss: Callable[[float], None] = FiniteLossCheck(self.optimizer).record_loss
        self.on_activity: Callable[[str], None] = lambda text: None
        self.micro_losses: dict[int, torch.Tensor] = {}
        self.has_weighted_loss: bool | None = None
        self._clock = clock_for(self.device)
        self._busy_timer = BubbleTimer(self._clock)

    def _set_engine(self, engine: Any) -> None:
        self.engine = engine
        self.module: torch.nn.Module = engine.module
        self.optimizer: MixedPrecisionOptimizer = engine.optimizer
        engine.enable_backward_allreduce = False  # DeepSpeed's engine reads it

    def use_deepspeed(self) -> None:
        """Switch to the DeepSpeed engine, which reads and writes DeepSpeed checkpoints. Collective."""
        if isinstance(self.engine, ModelEngine):
            counters = {name: getattr(self.engine, name) for name in COUNTERS}
            self._set_engine(self._make_deepspeed_engine())
            for name, value in counters.items():
                setattr(self.engine, name, value)

    def train_step(self, data: DataIterator, step: int, share: Share | None = None) -> StepResult:
        """Run this replica's micro-batches in one training step and update the weights. Collective.

        Args:
            data: iterator over this replica's micro-batches.
            step: step index, from 0.
            share: this replica's micro-batches; None uses ``self.share``.
        """
        share = share or self.share
        num_micro_batches, mean_num_micro_batches = share.num_micro_batches, share.mean_num_micro_batches
        tokens_per_step = self.micro_batch_tokens * mean_num_micro_batches
        optimizer = self.optimizer
        reported_values: dict[str, torch.Tensor] = {}
        meter = LossMeter(
            num_micro_batches,
            nominal_weight(tokens_per_step),
            self.device,
            lambda: reported_values,
            mean_num_micro_batches,
        )
        set_micro_batches(self.engine, num_micro_batches)
        self.engine.train()
        self.engine.set_gradient_accumulation_boundary(False)
        self.micro_losses.clear()
        if self.logits is not None:
            self.logits.start_step()

        # 1. Forward and backward of each micro-batch; gradients accumulate.
        start_mark = self._clock.mark()
        with sharing_quantized_weights(self.shares_quantized_weights and num_micro_batches > 1):
            for micro_batch in range(num_micro_batches):
                self.streams.position = DropoutKey(step, micro_batch, share.index_in_step(micro_batch) - micro_batch)
                self.on_activity(f"step {step + 1}, forward of micro-batch {micro_batch}")
                loss, report = self.forward_step(data, self.engine)
                reported_values = scalars(report, loss)
                loss = as_weighted(loss)
                if self.averages_micro_batches:
                    loss = mean_of_micro_batch(loss, self.grid.context)
                trained_loss = meter.add(loss, micro_batch)
                self.has_weighted_loss = next(iter(meter.loss_sums.values())).is_weighted
                self.micro_losses[micro_batch] = trained_loss.detach()
                if self.routers is not None:  # router losses are weighted like the cross-entropy
                    weight = token_weight(tokens_per_step, self.grid, is_mean=not self.has_weighted_loss)
                    self.routers.set_scale(optimizer.loss_scale / weight)
                self.on_activity(f"step {step + 1}, backward of micro-batch {micro_batch}")
                if micro_batch == num_micro_batches - 1:
                    optimizer.begin_last_backward()
                self.engine.backward(trained_loss * optimizer.loss_scale, scale_wrt_gas=False)
                optimizer.end_micro_batch()
        self._busy_timer.record(start_mark, self._clock.mark(), [])
        if self.logits is not None:
            self.logits.end_forwards()

        # 2. All-reduce of the losses over the replicas.
        self.on_activity(f"step {step + 1}, reduction and update")
        reduction = self._reduce_losses(meter)

        # 3. All-reduce of the gradients. The optimizer multiplies them by ``gradient_factor`` in the update.
        optimizer.finish_gradient_sums()
        read_ahead(data)
        read_with_norm(optimizer, reduction)

        # 4. Norm, clipping and update, or a skipped step.
        loss_scale = optimizer.loss_scale
        mean_loss, other_losses = loss_values(reduction.means())
        self.on_loss(mean_loss)
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        result = make_step_result(mean_loss, other_losses, loss_scale, optimizer)
        return result if self.routers is None else with_router_losses(result, self.routers, optimizer, self.device)

    @torch.no_grad()
    def evaluate_batch(self, data: DataIterator) -> float:
        """Compute the mean loss on one global batch, without dropout; training state is unchanged. Collective."""
        self.engine.eval()
        nominal = nominal_weight(self.micro_batch_tokens * self.share.mean_num_micro_batches)
        meter = LossMeter(
            self.share.num_micro_batches, nominal, self.device, mean_num_micro_batches=self.share.mean_num_micro_batches
        )
        with preserve_rng_states(self.device):  # the user's layers and data sets may draw random numbers
            for micro_batch in range(self.share.num_micro_batches):
                loss, _ = self.forward_step(data, self.engine)
                meter.add(as_weighted(loss), micro_batch)
        self.engine.train()
        return loss_values(self._reduce_losses(meter).means())[0]

    def _reduce_losses(self, meter: LossMeter) -> LossReduction:
        """All-reduce the losses over the data and context-parallel ranks. Collective."""
        replicas = self.grid.data_context
        return all_reduce_loss(meter, self.device, data_group=replicas.handle, data_size=replicas.size)

    def bubble(self) -> None:
        """Return None: there is no pipeline bubble."""

    def busy(self) -> tuple[float, int]:
        """Return (forward and backward seconds since the last call; step count)."""
        return busy_seconds(self._busy_timer.drain())

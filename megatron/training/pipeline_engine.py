"""PipelineStepEngine: one training step and one evaluation through tds's pipeline engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.config.batch import Share
from megatron.mpu.fp8_weights import sharing_quantized_weights
from megatron.mpu.random import DropoutKey
from megatron.optim import MixedPrecisionOptimizer
from megatron.training.loss_forms import (
    mean_of_micro_batch,
    nominal_weight,
    token_weight,
    with_router_losses,
    with_weighted_pairs,
)
from megatron.training.step_engine import (
    DataIterator,
    StepSettings,
    as_data_error,
    busy_seconds,
    loss_values,
    set_micro_batches,
)
from megatron.training.step_result import FiniteLossCheck, StepResult, make_step_result
from tds.loss import (
    WrappedLoss,
    is_weighted,
    named_losses,
)
from tds.schedule import Action
from tds.user_functions import LossFn


class PipelineStepEngine:
    """Training step for a model whose layers ``tds`` splits over several pipeline stages."""

    def __init__(self, engine: Any, settings: StepSettings) -> None:
        """Configure ``engine``, a ``tds.PipelineEngine``, for training."""
        share, micro_batch_tokens = settings.share, settings.micro_batch_tokens
        self.engine = engine
        self.module: torch.nn.Module = engine.module
        self.optimizer: MixedPrecisionOptimizer = engine.optimizer
        self.grid, self.streams = settings.grid, settings.streams
        self.share, self.micro_batch_tokens = share, micro_batch_tokens
        self.averages_micro_batches = settings.averages_micro_batches
        self.routers, self.device = settings.routers, torch.device(engine.device)
        self.logits, self.shares_quantized_weights = settings.logits, settings.shares_quantized_weights
        self._step, self._step_share, self._micro_batch = 0, share, 0
        self.micro_losses: dict[int, torch.Tensor] = {}
        self.has_weighted_loss: bool | None = None
        self.on_loss: Callable[[float], None] = FiniteLossCheck(self.optimizer).record_loss
        self.on_activity: Callable[[str], None] = lambda text: None
        engine.agrees_on_data = False  # training data loaders never end
        engine.nominal_weight = nominal_weight(micro_batch_tokens * share.mean_num_micro_batches)
        engine.mean_num_micro_batches = share.mean_num_micro_batches
        engine.module.loss_fn = self._recording_losses(with_weighted_pairs(engine.module.loss_fn))
        engine.on_micro_batch = self._start_micro_batch
        engine.on_action = self._begin_action
        engine.on_loss = lambda _: self.on_loss(loss_values(engine.means)[0])

    def train_step(self, data: DataIterator, step: int, share: Share | None = None) -> StepResult:
        """Run this replica's micro-batches in step ``step`` through the stages and update the weights. Collective."""
        self._step, self._step_share = step, share or self.share
        num_micro_batches = self._step_share.num_micro_batches
        mean_num_micro_batches = self._step_share.mean_num_micro_batches
        set_micro_batches(self.engine, num_micro_batches)
        self.engine.nominal_weight = nominal_weight(self.micro_batch_tokens * mean_num_micro_batches)
        self.engine.mean_num_micro_batches = mean_num_micro_batches
        self.micro_losses.clear()
        scale = self.optimizer.loss_scale
        if self.routers is not None:
            tokens = self.micro_batch_tokens * mean_num_micro_batches
            self.routers.set_scale(scale / token_weight(tokens, self.grid, is_mean=self._trains_on_means))
        if self.logits is not None:
            self.logits.start_step()
        is_sharing = self.shares_quantized_weights and num_micro_batches > 1
        with as_data_error(), sharing_quantized_weights(is_sharing):
            self.engine.train_batch(data)
        if self.logits is not None:
            self.logits.end_forwards()
        result = make_step_result(*loss_values(self.engine.means), scale, self.optimizer)
        return result if self.routers is None else with_router_losses(result, self.routers, self.optimizer, self.device)

    @torch.no_grad()
    def evaluate_batch(self, data: DataIterator) -> float:
        """Compute the mean loss on one global batch, without dropout; training state is unchanged. Collective."""
        with as_data_error():
            self.engine.eval_batch(data, num_micro_batches=self.share.num_micro_batches)
        return loss_values(self.engine.means)[0]  # already on the host, unlike the result of eval_batch

    def use_deepspeed(self) -> None:
        """No-op: tds's engine reads and writes DeepSpeed checkpoints itself."""

    def bubble(self) -> float | None:
        """Return the idle fraction of the stages in training steps since the last call. Collective.

        Returns None if there was no step.
        """
        share: float | None = self.engine.bubble()
        return share

    def busy(self) -> tuple[float, int]:
        """Return (compute seconds since the last call, without waits for other stages; step count)."""
        return busy_seconds(self.engine.step_times("busy"))

    def _begin_action(self, action: Action) -> None:
        """Report the action, and announce it to ZeRO 3, which gathers the weights that it reads. Collective."""
        self.on_activity(f"step {self._step + 1}, {action}")
        self.optimizer.store.begin_action(type(action).__name__, action.chunk)

    def _start_micro_batch(self, micro_batch: int) -> None:
        """Set the dropout mask position; called by the engine before each micro-batch."""
        self._micro_batch = micro_batch
        num_before = self._step_share.index_in_step(micro_batch) - micro_batch
        self.streams.position = DropoutKey(self._step, micro_batch, num_before)

    def _recording_losses(self, loss_fn: LossFn) -> WrappedLoss:
        """Wrap ``loss_fn`` to record the loss of each micro-batch in a step."""

        def recorded_loss(output: Any, labels: Any) -> Any:
            with self.optimizer.store.reading_weights():
                loss = loss_fn(output, labels)
            if torch.is_grad_enabled():
                loss = mean_of_micro_batch(loss, self.grid.context) if self.averages_micro_batches else loss
                trained_loss = next(iter(named_losses(loss, self._micro_batch).values()))
                self.has_weighted_loss = is_weighted(trained_loss)
                if self.routers is not None and self.has_weighted_loss == self._trains_on_means:
                    raise ValueError(self._loss_weighting_error())
                self.micro_losses[self._micro_batch] = torch.as_tensor(
                    getattr(trained_loss, "total", trained_loss)
                ).detach()
            return loss

        return WrappedLoss(recorded_loss, loss_fn)

    @property
    def _trains_on_means(self) -> bool:
        """True if a micro-batch is trained on its mean loss: with --loss-average, or by the model's ``loss_weighting``.

        Stages without the loss need this property, because they cannot inspect the loss.
        """
        return self.averages_micro_batches or getattr(self.module, "loss_weighting", None) == "micro-batches"

    def _loss_weighting_error(self) -> str:
        loss_type = "a pair (sum, count)" if self.has_weighted_loss else "one number per micro-batch"
        return (
            f"the loss function of {type(self.module).__name__} returns {loss_type}, but its attribute loss_weighting "
            f"is {getattr(self.module, 'loss_weighting', None)!r}. Every stage of a pipeline with experts weights the "
            "losses of its routers by this attribute. Set loss_weighting = "
            f'"{"tokens" if self.has_weighted_loss else "micro-batches"}" on the model.'
        )

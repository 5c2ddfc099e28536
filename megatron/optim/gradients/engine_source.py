"""EngineGradients: the optimizer's gradients in the interface of the pipeline engine of ``tds``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from megatron.optim.gradients.reduce_scatter import ReduceScatterGradReducer
from megatron.optim.gradients.reducer import GradReducer
from megatron.optim.param_store import ParamStore
from tds.bucket_reducer import Bucket, BucketSchedule
from tds.micro_batch_reducer import BackwardReduction


class GradientOwner(Protocol):
    """Interface of the optimizer whose gradients are adapted."""

    reducer: GradReducer
    store: ParamStore

    @property
    def loss_scale(self) -> float:
        """The factor by which losses are multiplied."""

    def gradient_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the accumulated gradient, or None for a parameter outside all groups."""

    def zero_grad(self) -> None:
        """Discard all gradients."""


class EngineGradients:
    """Implements ``tds.gradients.GradientSource`` for an optimizer that scales, clips and clears gradients itself.

    Hooks of the optimizer's reducer accumulate over micro-batches; the engine reduces over stages and replicas. With
    ZeRO 2 and 3 the engine starts the optimizer's own reduction in every backward.
    """

    accumulates_in_hooks = True
    supports_unfreezing = True
    scales_in_step = True
    clips_in_step = True
    norm_is_scaled = False

    def __init__(self, optimizer: GradientOwner) -> None:
        self._optimizer = optimizer

    @property
    def backward_reduction(self) -> BackwardReduction | None:
        """The reduction that the engine starts in every backward with ZeRO 2 and 3; None otherwise."""
        reducer = self._optimizer.reducer
        return reducer if isinstance(reducer, ReduceScatterGradReducer) else None

    def use_buckets(self, order: BucketSchedule) -> Callable[[Bucket], Any] | None:
        """Store gradients in the buckets of ``order``; return the function that starts a reduce-scatter, or None."""
        return self._optimizer.reducer.use_buckets(order)

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the accumulated gradient, or zeros if no micro-batch has reached ``parameter``."""
        gradient = self._optimizer.gradient_of(parameter)  # type: ignore[arg-type]
        if gradient is None:  # trained, but in no group of the optimizer
            gradient = parameter.grad = torch.zeros_like(parameter)
        return gradient

    def loss_scale(self) -> float:
        return float(self._optimizer.loss_scale)

    def before_backward(self) -> None:
        """Do nothing, because hooks accumulate the gradients."""

    def after_backward(self) -> None:
        """Free the weights that ZeRO 3 has gathered for the backward. Collective under ZeRO 3."""
        self._optimizer.store.end_action()

    def before_step(self) -> None:
        """Do nothing."""

    def after_step(self) -> None:
        self._optimizer.zero_grad()

    def discard(self) -> None:
        self._optimizer.zero_grad()

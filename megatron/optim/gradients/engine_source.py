"""EngineGradients: the optimizer's gradients in the interface of the pipeline engine of ``tds``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from megatron.optim.gradients.reducer import GradReducer
from tds.bucket_reducer import Bucket, BucketSchedule


class GradientOwner(Protocol):
    """Interface of the optimizer whose gradients are adapted."""

    reducer: GradReducer

    @property
    def loss_scale(self) -> float:
        """The factor by which losses are multiplied."""

    def gradient_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the accumulated gradient, or None for a parameter outside all groups."""

    def zero_grad(self) -> None:
        """Discard all gradients."""


class EngineGradients:
    """Implements ``tds.gradients.GradientSource`` for an optimizer that scales, clips and clears gradients itself.

    Hooks of the optimizer's reducer accumulate over micro-batches; the engine reduces over stages and replicas.
    """

    accumulates_in_hooks = True
    supports_unfreezing = True
    scales_in_step = True
    clips_in_step = True
    norm_is_scaled = False

    def __init__(self, optimizer: GradientOwner) -> None:
        self._optimizer = optimizer

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
        """Do nothing."""

    def before_step(self) -> None:
        """Do nothing."""

    def after_step(self) -> None:
        self._optimizer.zero_grad()

    def discard(self) -> None:
        self._optimizer.zero_grad()

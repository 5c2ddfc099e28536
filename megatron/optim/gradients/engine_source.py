"""Engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tds.gradient_reducer import Bucket, BucketSchedule


class EngineGradients:
    """What ``tds`` asks of an optimizer's gradients (``tds.gradients.GradientSource``).

    The engine adds up over micro-batches by autograd, over stages and replicas itself; the optimizer multiplies, takes
    the norm and clips in its own step, and forgets the gradients at its end.
    """

    come_in_hooks = takes_unfrozen = are_multiplied_in_step = clips_itself = True
    norm_is_scaled = False

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def follow(self, order: BucketSchedule) -> Callable[[Bucket], Any] | None:
        """Let gradients lie in the buckets of ``order``; return what starts sums that leave each replica its parts."""
        return self._optimizer.lay_gradients_out(order)

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the accumulated gradient, zeros if no micro-batch has reached ``parameter`` yet."""
        gradient = self._optimizer.gradient_of(parameter)
        if gradient is None:  # trained, and in no group of the optimizer
            gradient = parameter.grad = torch.zeros_like(parameter)
        return gradient

    def loss_scale(self) -> float:
        """Return what each loss is multiplied by ahead of its backward."""
        return float(self._optimizer.loss_scale)

    def before_backward(self) -> None:
        """Nothing is to be done: hooks take what autograd leaves."""

    def after_backward(self) -> None:
        """Nothing is to be done."""

    def before_step(self) -> None:
        """Nothing is to be done."""

    def after_step(self) -> None:
        """Forget all gradients."""
        self._optimizer.zero_grad()

    def forget(self) -> None:
        """Forget those of a batch on which no step is taken."""
        self._optimizer.zero_grad()

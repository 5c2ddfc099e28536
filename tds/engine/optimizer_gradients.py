"""OptimizerGradients: access to the gradients in ``param.grad`` or in an optimizer's own buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tds.bucket_reducer import BucketSchedule


class OptimizerGradients:
    """A ``GradientSource`` that reads gradients from ``param.grad``, or from ``optimizer.gradient_of`` if it exists.

    It serves optimizers without a ``gradient_source`` attribute. Megatron's optimizer has one:
    ``optim.gradients.engine_source``.
    """

    accumulates_in_hooks = True
    supports_unfreezing = True
    norm_is_scaled = False

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.scales_in_step = hasattr(optimizer, "gradient_factor")
        self._gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = getattr(
            optimizer, "gradient_of", lambda parameter: parameter.grad
        )

    @property
    def clips_in_step(self) -> bool:
        return bool(getattr(self.optimizer, "clips_gradients", False))

    def use_buckets(self, order: BucketSchedule) -> None:
        """Return None: the gradients stay in the optimizer's storage."""

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor:
        gradient = self._gradient_of(parameter)
        if gradient is None:
            parameter.grad = torch.zeros_like(parameter)
            gradient = self._gradient_of(parameter)
        if gradient is None:
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.gradient_of must return a gradient once param.grad is set, got None "
                f"for a parameter of shape {list(parameter.shape)}"
            )
        return gradient

    def loss_scale(self) -> float:
        scale = getattr(self.optimizer, "loss_scale", None)
        return 1.0 if scale is None else float(scale)

    def before_backward(self) -> None:
        return None

    def after_backward(self) -> None:
        return None

    def before_step(self) -> None:
        return None

    def after_step(self) -> None:
        if hasattr(self.optimizer, "gradient_of"):
            self.optimizer.zero_grad()

    def discard(self) -> None:
        self.optimizer.zero_grad()

"""Where gradients lie, whatever optimizer DeepSpeed has wrapped round the user's.

| optimizer | gradient of a parameter | scale of the loss | clips itself |
|---|---|---|---|
| torch's own | ``param.grad`` | 1 | no |
| one with ``gradient_of(param)`` | what it returns | ``loss_scale`` | if it has ``_global_grad_norm`` |
| DeepSpeed's BF16_Optimizer | its fp32 buffer | 1 | yes |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer


class Gradients:
    """Gradients in ``param.grad``, or wherever ``optimizer.gradient_of`` says.

    ``come_in_hooks``: a gradient is where it lies once the parameter's own hooks have run, ahead of ``after_backward``.
    """

    come_in_hooks = True

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._place: Callable[[torch.Tensor], torch.Tensor | None] = getattr(
            optimizer, "gradient_of", lambda parameter: parameter.grad
        )

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the accumulated gradient; zeros where this rank has none, so that all ranks agree."""
        gradient = self._place(parameter)
        if gradient is None:
            parameter.grad = torch.zeros_like(parameter)
            gradient = self._place(parameter)
        if gradient is None:
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.gradient_of must return a gradient once param.grad is set, got None "
                f"for a parameter of shape {list(parameter.shape)}"
            )
        return gradient

    def loss_scale(self) -> float:
        """Return what each loss is multiplied by ahead of its backward."""
        return float(getattr(self.optimizer, "loss_scale", 1.0))

    def before_backward(self) -> None:
        """Called ahead of each backward."""

    def after_backward(self) -> None:
        """Called after each backward."""

    def after_step(self) -> None:
        """Called after the optimizer's step."""
        if hasattr(self.optimizer, "gradient_of"):
            self.optimizer.zero_grad()


class BF16Gradients(Gradients):
    """Gradients in the fp32 buffers of DeepSpeed's BF16_Optimizer."""

    come_in_hooks = False

    def __init__(self, optimizer: BF16_Optimizer) -> None:
        super().__init__(optimizer)
        self._buffers = {
            parameter: buffer
            for parameters, buffers in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
            for parameter, buffer in zip(parameters, buffers, strict=True)
        }

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        return self._buffers[parameter]

    def loss_scale(self) -> float:
        return 1.0

    def before_backward(self) -> None:
        self.optimizer.clear_lp_grads()

    def after_backward(self) -> None:
        self.optimizer.update_hp_grads(clear_lp_grads=False)

    def after_step(self) -> None:
        return None


def gradients_of(optimizer: Any, zero_stage: int) -> Gradients:
    """Return the view of ``optimizer`` that the engine works with.

    Raises:
        NotImplementedError: an optimizer with which the engine would give wrong numbers.
    """
    if isinstance(optimizer, BF16_Optimizer):
        return BF16Gradients(optimizer)
    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)) or zero_stage > 0:
        raise NotImplementedError(
            f"the pipeline engine of tds cannot yet work with DeepSpeed's {type(optimizer).__name__} (ZeRO stage "
            f"{zero_stage}). Use ZeRO 0 in fp32, bf16 with ZeRO 1 and fp32 accumulation "
            '("data_types": {"grad_accum_dtype": "fp32"}), or an optimizer of your own that scales the loss.'
        )
    return Gradients(optimizer)


def clips_itself(optimizer: Any) -> bool:
    """True if the optimizer takes norm and clips in its own step."""
    return bool(getattr(optimizer, "clips_gradients", hasattr(optimizer, "_global_grad_norm")))

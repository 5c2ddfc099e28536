"""Where gradients lie, whatever optimizer DeepSpeed has wrapped round the user's, and who does what with them.

| optimizer | gradient of a parameter | scale of the loss | norm and clipping |
|---|---|---|---|
| torch's own | ``param.grad`` | 1 | ours, in fp64 |
| one with ``gradient_source`` | what that says (``tds.gradients.GradientSource``) | the same | the same |
| one with ``gradient_of(param)`` | what it returns | its ``loss_scale`` | its own if it has ``_global_grad_norm`` |
| FP16_Optimizer, FP16_UnfusedOptimizer | ``param.grad`` in fp16 | its own | its own, over all stages |
| BF16_Optimizer (bf16, with ZeRO 1 in fp32) | its buffer of ``grad_accum_dtype`` | 1 | its own, over all stages |
| DeepSpeedZeroOptimizer (ZeRO 1) | ``param.grad`` or ``param.grad_accum`` | its own | its own, over all |

In each case the engine itself adds up gradients: micro-batches by autograd, then the copies of tied weights, then the
replicas, in the gradients' own dtype or the JSON's "communication_data_type". An optimizer finds them where its own
reduction would have left them; that of ZeRO 1 then only takes the part that it updates. Whether a step is skipped
(fp16) is decided by DeepSpeed's optimizers with a flag summed over all stages and tensor ranks of a replica, so that
all skip the same and keep one scale.
"""

from __future__ import annotations

from typing import Any

import torch

from tds.deepspeed.api import (
    BF16_Optimizer,
    DeepSpeedZeroOptimizer,
    FP16_Optimizer,
    FP16_UnfusedOptimizer,
    has_own_norm,
    make_contiguous,
    summed_already,
)
from tds.engine.optimizer_gradients import OptimizerGradients
from tds.gradients import GradientSource
from tds.param_info import copy_attributes


class Gradients(OptimizerGradients):
    """Gradients of a user's optimizer, which may clip by itself as DeepSpeed's do."""

    @property
    def clips_itself(self) -> bool:
        return bool(getattr(self.optimizer, "clips_gradients", has_own_norm(self.optimizer)))


class FP16Gradients(Gradients):
    """Gradients of the scaled loss in ``param.grad``, which DeepSpeed's fp16 optimizers unscale, check and clip."""

    takes_unfrozen = False

    def __init__(self, optimizer: FP16_Optimizer | FP16_UnfusedOptimizer) -> None:
        super().__init__(optimizer)
        self.norm_is_scaled = isinstance(optimizer, FP16_UnfusedOptimizer)

    def before_step(self) -> None:
        """Let gradients say what their parameters do: FP16_UnfusedOptimizer takes its norm over the former alone, and
        would count tied weights twice and slices of a tensor group not at all."""
        for parameter in (p for group in self.optimizer.fp16_groups for p in group):
            copy_attributes(parameter, self.of(parameter))

    def after_step(self) -> None:
        return None


class BF16Gradients(Gradients):
    """Gradients in the buffers of DeepSpeed's BF16_Optimizer, in fp32 unless the JSON says bf16."""

    takes_unfrozen = False

    def __init__(self, optimizer: BF16_Optimizer) -> None:
        super().__init__(optimizer)
        self.come_in_hooks = bool(optimizer.immediate_grad_update)
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


class ZeroGradients(Gradients):
    """Gradients under ZeRO 1, which keeps the states of one part of the weights on each replica.

    DeepSpeed's hooks move gradients to ``param.grad_accum`` where the JSON has them accumulate in another dtype. All
    replicas' gradients are summed by the engine, beside the backward; they are rounded to "communication_data_type"
    only if the JSON has one.
    """

    takes_unfrozen = False

    def __init__(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        super().__init__(optimizer)
        self._name = "grad_accum" if optimizer.use_grad_accum_attribute else "grad"
        self._dtype = optimizer.gradient_accumulation_dtype if optimizer.use_grad_accum_attribute else None
        make_contiguous(optimizer)
        largest = sum(parameter.numel() for group in optimizer.bit16_groups for parameter in group)
        optimizer.reduce_bucket_size = min(optimizer.reduce_bucket_size, max(largest, 1))  # it allocates this much

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        gradient = getattr(parameter, self._name, None)
        if gradient is None:
            gradient = torch.zeros_like(parameter, dtype=self._dtype)
            setattr(parameter, self._name, gradient)
        return gradient

    def before_step(self) -> None:
        """Let ZeRO take the part of the sums that this replica updates, to the CPU if it is told so."""
        optimizer = self.optimizer
        optimizer.set_gradient_accumulation_boundary(True)
        with summed_already(optimizer):
            optimizer.reduce_gradients(pipeline_parallel=True)

    def after_step(self) -> None:
        return None


def gradients_of(optimizer: Any, zero_stage: int) -> GradientSource:
    """Return the view of ``optimizer`` that the engine works with.

    Raises:
        NotImplementedError: an optimizer with which the engine would give wrong numbers.
        ValueError: parameters that ZeRO would round.
    """
    if isinstance(optimizer, BF16_Optimizer):
        return BF16Gradients(optimizer)
    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        return FP16Gradients(optimizer)
    if type(optimizer) is DeepSpeedZeroOptimizer and zero_stage == 1:
        if any(parameter.dtype is torch.float64 for group in optimizer.bit16_groups for parameter in group):
            raise ValueError(
                "ZeRO keeps master weights in fp32, got parameters of fp64. Use zero_optimization.stage 0."
            )
        return ZeroGradients(optimizer)
    if zero_stage > 0:
        raise NotImplementedError(
            f"the pipeline engine of tds cannot work with DeepSpeed's {type(optimizer).__name__} (ZeRO stage "
            f"{zero_stage}). Use ZeRO 0, or ZeRO 1 without ZenFlow."
        )
    source: GradientSource | None = getattr(optimizer, "gradient_source", None)
    return Gradients(optimizer) if source is None else source

"""Gradient sources for DeepSpeed's optimizers.

| optimizer | parameter gradient | loss scale | norm and clipping |
|---|---|---|---|
| torch's optimizers | ``param.grad`` | 1 | by the engine, in fp64 |
| with ``gradient_source`` | by ``tds.gradients.GradientSource`` | by the source | by the source |
| with ``gradient_of(param)`` | its result | ``loss_scale`` | by the optimizer if it has ``_global_grad_norm`` |
| FP16_Optimizer, FP16_UnfusedOptimizer | ``param.grad`` in fp16 | by the optimizer | by it, over all stages |
| BF16_Optimizer (bf16, with ZeRO 1 in fp32) | buffer of ``grad_accum_dtype`` | 1 | by it, over all stages |
| DeepSpeedZeroOptimizer (ZeRO 1) | ``param.grad`` or ``param.grad_accum`` | by the optimizer | by it, over all stages |

The engine always reduces the gradients: autograd accumulates over micro-batches, then the engine sums the copies of
tied weights and all-reduces over the replicas. These sums have the gradients' type, or the "communication_data_type" of
the JSON. The results are stored where the optimizer's own reduction would have stored them. ZeRO 1 then only copies the
shard that it updates. In fp16, DeepSpeed's optimizers sum the overflow flag over all stages and tensor ranks in a
replica, so that all ranks skip the same steps and have the same loss scale.
"""

from __future__ import annotations

from typing import Any

import torch

from tds.deepspeed.api import (
    BF16_Optimizer,
    DeepSpeedZeroOptimizer,
    FP16_Optimizer,
    FP16_UnfusedOptimizer,
    computes_grad_norm,
    skip_all_reduce,
    use_contiguous_gradients,
)
from tds.engine.optimizer_gradients import OptimizerGradients
from tds.gradients import GradientSource
from tds.param_info import copy_attributes


class Gradients(OptimizerGradients):
    """Gradients of any optimizer, including optimizers that clip gradients in their step, as DeepSpeed's do."""

    @property
    def clips_in_step(self) -> bool:
        return bool(getattr(self.optimizer, "clips_gradients", computes_grad_norm(self.optimizer)))


class FP16Gradients(Gradients):
    """Gradients of the scaled loss in ``param.grad``, which DeepSpeed's fp16 optimizers unscale, check and clip."""

    supports_unfreezing = False

    def __init__(self, optimizer: FP16_Optimizer | FP16_UnfusedOptimizer) -> None:
        super().__init__(optimizer)
        self.norm_is_scaled = isinstance(optimizer, FP16_UnfusedOptimizer)

    def before_step(self) -> None:
        """Copy each parameter's attributes to its gradient.

        FP16_UnfusedOptimizer computes the norm from the gradients' attributes. Without them it would count tied weights
        twice and omit tensor-group shards.
        """
        for parameter in (p for group in self.optimizer.fp16_groups for p in group):
            copy_attributes(parameter, self.gradient_of(parameter))

    def after_step(self) -> None:
        return None


class BF16Gradients(Gradients):
    """Gradients in the buffers of DeepSpeed's BF16_Optimizer, in fp32 unless the JSON sets bf16."""

    supports_unfreezing = False

    def __init__(self, optimizer: BF16_Optimizer) -> None:
        super().__init__(optimizer)
        self.accumulates_in_hooks = bool(optimizer.immediate_grad_update)
        self._buffers = {
            parameter: buffer
            for parameters, buffers in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
            for parameter, buffer in zip(parameters, buffers, strict=True)
        }

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor:
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
    """Gradients under ZeRO 1, which shards the optimizer states over the replicas.

    If the JSON sets another dtype for accumulation, DeepSpeed's hooks move gradients to ``param.grad_accum``. The
    engine all-reduces the gradients over the replicas during the backward. It rounds them to "communication_data_type"
    only if the JSON sets it.
    """

    supports_unfreezing = False

    def __init__(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        super().__init__(optimizer)
        self._grad_attribute = "grad_accum" if optimizer.use_grad_accum_attribute else "grad"
        self._dtype = optimizer.gradient_accumulation_dtype if optimizer.use_grad_accum_attribute else None
        use_contiguous_gradients(optimizer)
        num_elements = sum(parameter.numel() for group in optimizer.bit16_groups for parameter in group)
        # The optimizer allocates a buffer with this size.
        optimizer.reduce_bucket_size = min(optimizer.reduce_bucket_size, max(num_elements, 1))

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor:
        gradient = getattr(parameter, self._grad_attribute, None)
        if gradient is None:
            gradient = torch.zeros_like(parameter, dtype=self._dtype)
            setattr(parameter, self._grad_attribute, gradient)
        return gradient

    def before_step(self) -> None:
        """Make ZeRO copy this replica's shard of the reduced gradients, to the CPU if offload is configured."""
        optimizer = self.optimizer
        optimizer.set_gradient_accumulation_boundary(True)
        with skip_all_reduce(optimizer):
            optimizer.reduce_gradients(pipeline_parallel=True)

    def after_step(self) -> None:
        return None


def gradient_source_for(optimizer: Any, zero_stage: int) -> GradientSource:
    """Create the gradient source for ``optimizer``.

    Raises:
        NotImplementedError: the engine does not support the optimizer.
        ValueError: parameters are fp64, which ZeRO would round to fp32.
    """
    if isinstance(optimizer, BF16_Optimizer):
        return BF16Gradients(optimizer)
    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        return FP16Gradients(optimizer)
    if type(optimizer) is DeepSpeedZeroOptimizer and zero_stage == 1:
        if any(parameter.dtype is torch.float64 for group in optimizer.bit16_groups for parameter in group):
            raise ValueError("ZeRO keeps the main params in fp32, got fp64 parameters. Use zero_optimization.stage 0.")
        return ZeroGradients(optimizer)
    if zero_stage > 0:
        raise NotImplementedError(
            f"the pipeline engine of tds does not support DeepSpeed's {type(optimizer).__name__} (ZeRO stage "
            f"{zero_stage}). Use ZeRO 0, or ZeRO 1 without ZenFlow."
        )
    source: GradientSource | None = getattr(optimizer, "gradient_source", None)
    return Gradients(optimizer) if source is None else source

"""Where gradients lie, whatever optimizer DeepSpeed has wrapped round the user's, and who does what with them.

| optimizer | gradient of a parameter | scale of the loss | norm and clipping |
|---|---|---|---|
| torch's own | ``param.grad`` | 1 | ours, in fp64 |
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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


class Gradients:
    """Gradients in ``param.grad``, or wherever ``optimizer.gradient_of`` says.

    ``before_backward`` and ``after_backward`` surround each run of autograd: a whole backward, or either half of one
    that is split. Between them autograd may add to any parameter's ``grad``, more than once (recompute, tied layers in
    one stage), and run its hooks. Between ``after_backward`` and the next ``before_backward`` nothing touches
    gradients but ``of``, from which sums over replicas may start once no backward will add to a gradient any more.

    An optimizer with ``gradient_factor`` multiplies by it in its own step, and gives the norm of what lies there ahead
    of that (``norm_of_sums``; it takes it back as ``raw_norm``): so loss and norm come to the host in one copy.

    Attributes:
        come_in_hooks: a gradient is where it lies once the parameter's own hooks have run, ahead of
            ``after_backward``: sums may start within a backward.
        norm_is_scaled: the norm that the optimizer leaves is that of the scaled loss's gradients.
        takes_unfrozen: the optimizer steps on whatever its groups hold, weights unfrozen since ``initialize`` too.
    """

    come_in_hooks = True
    takes_unfrozen = True
    norm_is_scaled = False

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.are_multiplied_in_step = hasattr(optimizer, "gradient_factor")
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
        scale = getattr(self.optimizer, "loss_scale", None)
        return 1.0 if scale is None else float(scale)

    def before_backward(self) -> None:
        """Called ahead of each run of autograd."""

    def after_backward(self) -> None:
        """Called after each run of autograd."""

    def before_step(self) -> None:
        """Called once the gradients of the global batch are complete, ahead of the optimizer's step."""

    def after_step(self) -> None:
        """Called after the optimizer's step."""
        if hasattr(self.optimizer, "gradient_of"):
            self.optimizer.zero_grad()

    def forget(self) -> None:
        """Drop the gradients of a batch on which no step is taken."""
        self.optimizer.zero_grad()


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
            gradient = self.of(parameter)
            for mark in ("ds_pipe_replicated", "model_parallel", "tensor_model_parallel"):
                setattr(gradient, mark, getattr(parameter, mark, False))

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
        _make_contiguous(optimizer)
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
        with _summed_already(optimizer):
            optimizer.reduce_gradients(pipeline_parallel=True)

    def after_step(self) -> None:
        return None


def _make_contiguous(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Let ``optimizer`` keep gradients in one buffer, whatever the JSON says: so it takes over sums."""
    if optimizer.contiguous_gradients:
        return
    optimizer.contiguous_gradients = True
    optimizer._release_ipg_buffers()
    if not optimizer._grad_acc_hooks:
        optimizer.create_gradient_handling_hooks()


@contextmanager
def _summed_already(optimizer: DeepSpeedZeroOptimizer) -> Iterator[None]:
    """Let its reduction go through all but the sum and mean over replicas."""
    optimizer.average_tensor = optimizer._add_full_reduction_to_compact_grad_partition
    try:
        yield
    finally:
        del optimizer.average_tensor


def gradients_of(optimizer: Any, zero_stage: int) -> Gradients:
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
    return Gradients(optimizer)


def clips_itself(optimizer: Any) -> bool:
    """True if the optimizer takes norm and clips in its own step."""
    return bool(getattr(optimizer, "clips_gradients", hasattr(optimizer, "_global_grad_norm")))

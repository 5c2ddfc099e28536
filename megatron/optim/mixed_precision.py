"""One optimizer step in fp32, fp64, bf16 or fp16: master weights, overflow, norm, clipping, update.

Both engines call ``step()`` with gradients that are reduced over the data-parallel replicas already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron.errors import NumericsError
from megatron.mpu.grads import clip_coefficient, counts_here, global_norm
from megatron.mpu.groups import SINGLE, Group
from megatron.optim.masters import WIDE, Masters
from megatron.optim.optimizer_state import state_of, take_state
from megatron.optim.scaler import LossScaler


class MixedPrecisionOptimizer(torch.optim.Optimizer):
    """Wraps a torch optimizer that updates fp32 (or fp64) masters of the model's parameters.

    A parameter of 16 bits has a master of 32: its gradient of each micro-batch is added to the master's in fp32 and
    freed at once, and the updated master is rounded back into it. Other parameters are their own masters.

    With ZeRO 1 each replica has the master and the states of its part of every parameter (``megatron.optim.cuts``) and
    gathers the others' parts after the update. Gradients stay whole, so norm, clipping and weights are those of ZeRO 0.

    Args:
        groups: parameter groups as torch's optimizers take them, over the model's own parameters.
        build: makes the inner optimizer from the groups of masters.
        dtype: type of the model's parameters from now on.
        clip_grad: largest gradient norm; 0 turns clipping off.
        model, tensor: groups of one replica and of its tensor-parallel ranks.
        data: the replicas of what this rank holds.
        zero_stage: 0 or 1; of ``build`` 1 asks that it updates each number by itself.

    Attributes:
        gradient_factor: what the next step multiplies the gradients by, in the pass that clips them; 1 again after it.
        overflow: the last step was skipped because fp16 gradients overflowed.
        judge: asked with the norm ahead of each update, overflows of fp16 aside; False leaves the weights as they
            are. It must answer the same on every rank. None: a norm that is not finite raises.
        was_refused: ``judge`` said False in the last step.
        _global_grad_norm: ``grad_norm`` by the name that DeepSpeed asks for.
    """

    clips_gradients = True

    def __init__(
        self,
        groups: list[dict[str, Any]],
        build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        *,
        dtype: torch.dtype = torch.float32,
        clip_grad: float = 0.0,
        scaler: LossScaler | None = None,
        model: Group = SINGLE,
        tensor: Group = SINGLE,
        data: Group = SINGLE,
        zero_stage: int = 0,
    ) -> None:
        self.clip_grad = clip_grad
        self.scaler = scaler or LossScaler()
        self.model_group, self.tensor_group = model, tensor
        self.gradient_factor = 1.0
        self.overflow = False
        self.judge: Callable[[float], bool] | None = None
        self.was_refused = False
        self._global_grad_norm = 0.0
        self._masters = Masters(data, is_cut=zero_stage == 1)
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}  # fp32 gradients of 16-bit parameters
        masters = [{**group, "params": [self._adopt(p, dtype) for p in group["params"]]} for group in groups]
        self.inner = build(masters)
        super().__init__(self.inner.param_groups, {})

    @property
    def loss_scale(self) -> float:
        """The factor on the loss, for the backward pass of the next micro-batch."""
        return self.scaler.scale

    @property
    def grad_norm(self) -> float:
        """Norm of the last step's gradients before clipping, without loss scale."""
        return self._global_grad_norm

    def master_of(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """Return the tensor that the inner optimizer updates for ``parameter``; ``shard_of`` says where it lies."""
        return self._masters.of[parameter]

    def owns(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether this rank writes its master of ``parameter``, or a frozen one, into a checkpoint."""
        is_writer = self._masters.data_group.rank == 0 or self._masters.is_cut(parameter)
        return is_writer and counts_here(parameter, self.tensor_group.rank)

    def gradient_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the gradient accumulated for ``parameter``, zeros if no micro-batch has reached it yet."""
        if parameter not in self._masters.of:
            return parameter.grad
        if parameter.dtype not in WIDE:
            if parameter not in self._sums:
                self._sums[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
            return self._sums[parameter]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters, or skip when fp16 gradients have overflowed or ``judge`` refuses. Collective.

        Raises:
            NumericsError: the norm is not finite, and there is no loss scale to blame or it is at its smallest.
        """
        factor, self.gradient_factor = self.gradient_factor / self.loss_scale, 1.0
        norm = self._norm() * factor
        self._global_grad_norm = norm
        self.overflow = not math.isfinite(norm) and self.scaler.is_to_blame
        self.was_refused = not self.overflow and self._is_refused(norm)
        if not self.overflow and not self.was_refused:
            self._hand_to_masters(clip_coefficient(norm, self.clip_grad) * factor)
            self.update_masters()
            self.copy_masters_to_parameters()
        if not self.was_refused:
            self.scaler.update(self.overflow)
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, of masters and parameters."""
        self._sums.clear()
        for parameter, master in self._masters.of.items():
            parameter.grad = None
            master.grad = None

    def copy_masters_to_parameters(self) -> None:
        """Bring what the masters hold into the parameters. With ZeRO 1 collective over the replicas."""
        self._masters.to_parameters()

    @torch.no_grad()
    def update_masters(self) -> None:
        """Let the inner optimizer step on the gradients that the masters have, as they are."""
        with self._masters.contiguous():
            self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        """Return masters, moments and loss scale of this rank, for checkpoints in DeepSpeed's layout.

        Raises:
            RuntimeError: with ZeRO 1, whose parts of masters no file of DeepSpeed's would hold.
        """
        if any(self._masters.is_cut(parameter) for parameter in self._masters.of):
            raise RuntimeError("a state_dict is of whole masters, got ZeRO 1: save with --checkpoint-format native")
        return state_of(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what ``state_dict`` returned, and let the parameters follow; rates and decay stay those of now.

        Raises:
            ValueError: it is of other parameters; nothing has been changed then.
        """
        take_state(self, state_dict)
        self.copy_masters_to_parameters()

    def refresh_fp32_params(self) -> None:
        """Let the masters take what the parameters hold: DeepSpeed's name, called when weights alone were loaded."""
        self._masters.from_parameters()

    def gradients(self) -> Iterable[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return (parameter, gradient) pairs in the order of the groups."""
        for parameter in self._masters.of:
            gradient = self.gradient_of(parameter)
            if gradient is not None:
                yield parameter, gradient

    def _adopt(self, parameter: torch.nn.Parameter, dtype: torch.dtype) -> torch.nn.Parameter:
        if dtype not in WIDE:
            parameter.register_post_accumulate_grad_hook(self._add_to_sum)
        return self._masters.adopt(parameter, dtype)

    def _add_to_sum(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        if parameter in self._sums:
            self._sums[parameter].add_(parameter.grad)  # type: ignore[index]
        else:
            self._sums[parameter] = parameter.grad.float()  # type: ignore[index]
        parameter.grad = None

    def _norm(self) -> float:
        counted = [g for p, g in self.gradients() if counts_here(p, self.tensor_group.rank)]
        device = next((parameter.device for parameter in self._masters.of), None)
        return global_norm(counted, model=self.model_group, device=device).item()

    def _is_refused(self, norm: float) -> bool:
        if self.judge is not None:
            return not self.judge(norm)
        if not math.isfinite(norm):
            raise NumericsError(self.not_finite_text(norm))
        return False

    def not_finite_text(self, norm: float) -> str:
        """Return what to say of a norm that is not finite, where no smaller loss scale can help."""
        if self.scaler.is_dynamic:
            return (
                f"overflow at the smallest loss scale ({self.loss_scale:g}); the gradients themselves are not finite: "
                "lower --lr or use bf16. The weights are as before this step."
            )
        return (
            f"the gradient norm must be finite, got {norm}. The weights are as before this step. "
            "Lower --lr, or look at the batch."
        )

    def _hand_to_masters(self, factor: float) -> None:
        """Give each master its part of the gradient, times ``factor``."""
        parts = []
        for parameter, gradient in self.gradients():
            parts.append(self._masters.part(parameter, gradient))
            self.master_of(parameter).grad = parts[-1]
        if factor != 1.0:
            torch._foreach_mul_(parts, factor)

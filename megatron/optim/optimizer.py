"""MixedPrecisionOptimizer: one optimizer step in fp32, fp64, bf16 or fp16.

| part | responsible for |
|---|---|
| ``ParamStore`` | main params, shards, offload, copying updates into the parameters |
| ``GradReducer`` | accumulation over micro-batches, reduction over replicas and further groups |
| ``StepPolicy`` | loss scale, overflow, veto, clipping |
| the inner optimizer | the update of the main params |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from megatron.mpu import fp8_weights
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import Shard, shard_of
from megatron.optim.grad_scaler import GradScaler
from megatron.optim.gradients.engine_source import EngineGradients
from megatron.optim.gradients.make_reducer import make_reducer
from megatron.optim.param_store import ParamStore
from megatron.optim.state import load_state, state_of
from megatron.optim.step_policy import StepPolicy
from tds.grad_norm import accurate_dtype
from tds.linear_function import can_add_products
from tds.param_info import info_of, set_info


class MixedPrecisionOptimizer(torch.optim.Optimizer):
    """Wraps a torch optimizer that updates fp32 (or fp64) main params of the model's parameters.

    Gradients of 16-bit parameters are accumulated in fp32, and updated main params are rounded into the parameters.

    | ZeRO | each replica keeps its shards of | results relative to ZeRO 0 |
    |---|---|---|
    | 1 | main params and optimizer states | bitwise equal |
    | 2 | gradients too | equal gradients with one micro-batch per step; the norm is equal up to rounding |
    | 3 | weights too, after ``store.shard_weights`` | as with ZeRO 2 |

    Args:
        groups: parameter groups, as for torch's optimizers, over the model's parameters.
        build: builds the inner optimizer from the groups of main params. With ZeRO it must update element by element.
        dtype: training dtype of the parameters.
        clip_grad: largest gradient norm; 0 disables clipping.
        scaler: the loss scale; None: a fixed scale of 1.
        model, tensor: model-parallel group (one replica), and tensor-parallel group.
        store: an empty store for the parameters; None for a single replica without ZeRO and offload.
        overlap_grad_reduce, has_pipeline: see ``make_reducer``.
        fuses_accumulation: with ZeRO 0 and 1, layers add products in place (``tds.linear_function``).

    Attributes:
        store, reducer, policy, inner: the parts in the table of the module.
        gradient_factor: factor by which the next step multiplies the gradients; each step resets it to 1.
        last_factor: factor of the last step's gradients before clipping: ``gradient_factor`` divided by the loss scale.
        after_update: called after the inner optimizer has updated the main params, before they are copied into the
            parameters; not called in skipped steps.
        raw_norm: result of ``norm_of_sums`` for the current gradients, if it has been computed already.
        overflow: True if the last step was skipped because fp16 gradients overflowed.
        was_rejected: True if ``policy.accepts_step`` rejected the last step.
        clips_gradients: True, because ``step`` clips and engines must not.
        _global_grad_norm: ``grad_norm`` under the name that DeepSpeed reads.
    """

    clips_gradients = True

    def __init__(
        self,
        groups: list[dict[str, Any]],
        build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        *,
        dtype: torch.dtype = torch.float32,
        clip_grad: float = 0.0,
        scaler: GradScaler | None = None,
        model: Group = SINGLE,
        tensor: Group = SINGLE,
        store: ParamStore | None = None,
        overlap_grad_reduce: bool = False,
        has_pipeline: bool = False,
        fuses_accumulation: bool = False,
    ) -> None:
        self.store = store or ParamStore()
        self.reducer = make_reducer(
            self.store, model, tensor, overlap_grad_reduce=overlap_grad_reduce, has_pipeline=has_pipeline
        )
        self.policy = StepPolicy(scaler or GradScaler(), clip_grad)
        if fuses_accumulation and self.store.zero_stage > 1:
            raise ValueError(
                f"--gradient-accumulation-fusion requires --zero-stage 0 or 1, got {self.store.zero_stage}, which "
                "keeps no full gradients to accumulate into. Omit one of the two flags"
            )
        self._fuses_accumulation = fuses_accumulation
        self.gradient_factor = self.last_factor = 1.0
        self.after_update: Callable[[], None] | None = None
        self.raw_norm: float | None = None
        self.overflow = self.was_rejected = False
        self._global_grad_norm = 0.0
        main_groups = [{**group, "params": [self._register(p, dtype) for p in group["params"]]} for group in groups]
        self.inner = build(main_groups)
        super().__init__(self.inner.param_groups, {})

    def _register(self, parameter: torch.nn.Parameter, dtype: torch.dtype) -> torch.nn.Parameter:
        main_param = self.store.register(parameter, dtype)
        self.reducer.register(parameter)
        if self._fuses_accumulation and can_add_products(parameter, accurate_dtype(dtype)):
            add_product = functools.partial(self.reducer.add_product, parameter)
            set_info(parameter, replace(info_of(parameter), add_product=add_product))
        return main_param

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters, unless fp16 gradients have overflowed or the step is rejected. Collective.

        Raises:
            NumericsError: the norm is not finite, no smaller loss scale can help, and ``policy.accepts_step`` is None.
            ConfigError: with ZeRO 3, the replicas did not call the same layers.
        """
        self.store.check_gather_order()
        self.store.finish_gathers()
        self.last_factor, self.gradient_factor = self.gradient_factor / self.loss_scale, 1.0
        norm = (self.norm_of_sums().item() if self.raw_norm is None else self.raw_norm) * self.last_factor
        self._global_grad_norm = norm
        self.overflow = self.policy.has_overflowed(norm)
        self.was_rejected = not self.overflow and self.policy.rejects(norm)
        is_accepted = not self.overflow and not self.was_rejected
        fp8_weights.free()  # before the states of the update are allocated
        if is_accepted:
            self._set_grads(self.policy.clip_factor(norm) * self.last_factor)
            self.update_main_params()
            if self.after_update is not None:
                self.after_update()
        self.zero_grad()  # before weights are gathered, which can then use the memory of the gradients
        if is_accepted and self.store.has_copies:
            self.store.copy_to_parameters(deferred=True)
        if not self.was_rejected:
            self.scaler.update(self.overflow)

    def _set_grads(self, factor: float) -> None:
        """Set main-param gradients to the reduced gradients times ``factor``."""
        grads = [self.reducer.grad_of_main_param(parameter) for parameter in self.store.main_params]
        if factor != 1.0:
            torch._foreach_mul_(grads, factor)
        self.store.set_grads(grads)

    @torch.no_grad()
    def update_main_params(self) -> None:
        """Run the inner optimizer on the main-param gradients."""
        with self.store.contiguous_main_params() if self.store.has_copies else nullcontext():
            self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients."""
        self.raw_norm = None
        self.reducer.clear()
        self.store.clear_grads()

    def norm_of_sums(self) -> torch.Tensor:
        """Return the norm of the reduced gradients, still multiplied by the loss scale. Collective.

        ``gradient_factor`` is not applied either. The host does not wait for the norm, so that a caller can copy it to
        the host together with other values.
        """
        return self.reducer.norm()

    # Gradients.

    @property
    def gradient_source(self) -> EngineGradients:
        """Gradient source for the pipeline engine."""
        return EngineGradients(self)

    def begin_last_backward(self) -> None:
        """Announce the step's last backward on all replicas, during which reductions may start."""
        self.reducer.begin_last_backward()

    def end_micro_batch(self) -> None:
        """Complete a micro-batch after its backward: ZeRO 2 reduces gradients, ZeRO 3 frees weights. Collective."""
        self.store.end_micro_batch()
        self.reducer.end_micro_batch()

    @torch.no_grad()
    def finish_gradient_sums(self, factor: float = 1.0) -> None:
        """Complete the gradient reduction over replicas and multiply by ``factor``. Collective."""
        self.reducer.finish(factor)

    def gradient_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the accumulated gradient: this replica's reduced shard from ZeRO 2 on."""
        return self.reducer.grad(parameter) if parameter in self.store.main_params else parameter.grad

    def gradient_shard(self, parameter: torch.nn.Parameter) -> Shard:
        """Return the position of ``gradient_of(parameter)`` in the global tensor."""
        return self.reducer.shard(parameter) if parameter in self.store.main_params else shard_of(parameter)

    def gradients(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return (parameter, gradient) pairs in group order."""
        return [(parameter, self.reducer.grad(parameter)) for parameter in self.store.main_params]

    # State.

    @property
    def scaler(self) -> GradScaler:
        """The loss scale and its schedule."""
        return self.policy.scaler

    @property
    def loss_scale(self) -> float:
        """The factor by which losses are multiplied before backward."""
        return self.scaler.scale

    @property
    def grad_norm(self) -> float:
        """Norm of the last step's gradients before clipping, without the loss scale."""
        return self._global_grad_norm

    def main_param_of(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """Return the main param of ``parameter``; ``shard_of`` returns its position in the global tensor."""
        return self.store.main_params[parameter]

    def owns(self, parameter: torch.nn.Parameter) -> bool:
        """Return True if this rank saves the main param, or the frozen parameter, in a checkpoint."""
        return self.store.is_first_copy(parameter) and self.reducer.is_first_in_tensor_group(parameter)

    def owns_replicated_state(self, parameter: torch.nn.Parameter) -> bool:
        """Return True if this rank saves a state of ``parameter`` that every rank with a shard of it holds in full."""
        return self.store.group_of(parameter).rank == 0 and self.reducer.tensor_group_of(parameter).rank == 0

    def copy_main_params_to_parameters(self) -> None:
        """Round the main params into the parameters. Collective over replicas with ZeRO."""
        self.store.copy_to_parameters()

    def refresh_fp32_params(self) -> None:
        """Copy the parameters into the main params. DeepSpeed calls this after it has loaded only weights."""
        self.store.copy_from_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for checkpoints in DeepSpeed's format.

        Raises:
            RuntimeError: with ZeRO, whose shards do not fit that format.
        """
        if any(map(self.store.is_sharded, self.store.main_params)):
            raise RuntimeError(
                "state_dict requires full main params, but ZeRO shards them. Use --checkpoint-format native"
            )
        return state_of(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` and copy it into the parameters; learning rates and weight decay do not change.

        Raises:
            ValueError: the state belongs to other parameters; nothing is changed then.
        """
        load_state(self, state_dict)
        self.copy_main_params_to_parameters()

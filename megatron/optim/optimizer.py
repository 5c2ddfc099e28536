"""MixedPrecisionOptimizer: main weights, overflow, norm, clipping, update, state_dict."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch

from megatron.errors import NumericsError
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import Shard, shard_of
from megatron.optim.grad_scaler import GradScaler
from megatron.optim.main_params import (
    BufferedGradients,
    EngineGradients,
    ExpertGradients,
    Gradients,
    MainGradients,
    MainParams,
    OverlappedMainGradients,
    SequenceParallelGradients,
)
from megatron.optim.zero.param_gather import ParamGather
from megatron.optim.zero.partition import NOTHING, OffloadConfig, ParamInit
from megatron.optim.zero.stage2 import PartitionedGradients
from megatron.optim.zero.stage3 import ParamUnits
from tds.grad_norm import accurate_dtype, clip_coefficient, global_norm, is_counted_in_norm
from tds.gradient_reducer import Bucket, BucketSchedule
from tds.gradients import is_reduced_apart
from tds.linear import can_add_products
from tds.param_info import info_of, set_info

# The state of a ``MixedPrecisionOptimizer`` in the form of torch's optimizers, which DeepSpeed's checkpoints hold.


class Holder(Protocol):
    """What of the optimizer is read and set here."""

    param_groups: list[dict[str, Any]]
    inner: torch.optim.Optimizer
    scaler: GradScaler


def state_of(optimizer: Holder) -> dict[str, Any]:
    """Return torch's ``state`` and ``param_groups``, the ``masters`` in the order of the groups, and the ``scaler``.

    The tensors are the optimizer's own, not copies.
    """
    masters = [master.detach() for master in _masters(optimizer)]
    return {**optimizer.inner.state_dict(), "masters": masters, "scaler": optimizer.scaler.state()}


@torch.no_grad()
def take_state(optimizer: Holder, state: Mapping[str, Any]) -> None:
    """Copy what ``state_of`` returned into masters, states and a dynamic loss scale; rates and decay stay those of now.

    Raises:
        ValueError: it is of other parameters; nothing has been changed then.
    """
    masters = _masters(optimizer)
    if problem := _problem(masters, state):
        raise ValueError(problem)
    optimizer.inner.state.clear()
    for number, values in state["state"].items():
        master = masters[number]
        dtypes = {"step": None, **getattr(optimizer.inner, "state_dtypes", {})}
        kept = {key: _beside(master, dtypes.get(key, master.dtype), value) for key, value in values.items()}
        optimizer.inner.state[master] = kept
    for master, saved in zip(masters, state["masters"], strict=True):
        master.copy_(saved)
    optimizer.scaler.load(state["scaler"])


def _masters(optimizer: Holder) -> list[torch.nn.Parameter]:
    return [master for group in optimizer.param_groups for master in group["params"]]


def _problem(masters: Sequence[torch.Tensor], state: Mapping[str, Any]) -> str | None:
    if missing := {"state", "masters", "scaler"} - set(state):
        return f"it must be a state of this project's optimizer, got one without {', '.join(sorted(missing))}"
    shapes, now = [tuple(saved.shape) for saved in state["masters"]], [tuple(master.shape) for master in masters]
    if len(shapes) != len(now):
        return f"the optimizer must have the parameters that it was saved with: saved {len(shapes)}, now {len(now)}"
    for number, (saved, here) in enumerate(zip(shapes, now, strict=True)):
        if saved != here:
            return f"parameter {number} of the optimizer was saved as {list(saved)}, now {list(here)}"
    return None


def _beside(master: torch.Tensor, dtype: torch.dtype | None, value: Any) -> Any:
    """Return a copy of ``value`` on the device of ``master``, in ``dtype``, or its own."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device=master.device, dtype=dtype, copy=True)


# One optimizer step in fp32, fp64, bf16 or fp16: master weights, overflow, norm, clipping, update.
#
# Both engines call ``step()`` with gradients that are reduced over the data-parallel replicas already, by the engine
# or, from ZeRO 2 on, by ``megatron.optim.zero.stage2``.


class MixedPrecisionOptimizer(torch.optim.Optimizer):
    """Wraps a torch optimizer that updates fp32 (or fp64) masters of the model's parameters.

    A parameter of 16 bits has a master of 32: its gradient of each micro-batch is added to the master's in fp32 and
    freed at once, and the updated master is rounded back into it. Other parameters are their own masters.

    | ZeRO | a replica keeps its parts (``zero.partition``) of | the step's numbers beside those of ZeRO 0 |
    |---|---|---|
    | 1 | masters and states; it gathers the others' after the update | the same bits |
    | 2 | gradients too (``gradient_parts``) | the same gradients, with one micro-batch a step; the norm to rounding |
    | 3 | weights too, after ``cut_weights`` (``weight_units``) | those of ZeRO 2 |

    Args:
        groups: parameter groups as torch's optimizers take them, over the model's own parameters.
        build: makes the inner optimizer from the groups of masters.
        dtype: type of the model's parameters from now on.
        clip_grad: largest gradient norm; 0 turns clipping off.
        model, tensor: groups of one replica and of its tensor-parallel ranks.
        data: the replicas of what this rank holds.
        expert_data: those of its experts, where ranks of ``data`` have other ones (``tds.gradients.is_reduced_apart``).
        zero_stage: 0 to 3; of ``build`` all but 0 ask that it updates each number by itself.
        overlaps_sums: with ZeRO 0 and 1 sum gradients over the replicas here, while the backward runs that
            ``begin_last_backward`` announces; else the engine does it. From ZeRO 2 on they always are.
        offload: what lies on the CPU; ``build`` then makes an optimizer for tensors there.
        param_init: with ZeRO 3, how weights come that are not where they are trained yet; their parts alone go there.

        reduce_bucket_size, allgather_bucket_size: as ``MainParams``.
        prefetches: with ZeRO 3 gather the weights of a layer ahead of its call.
        fuses_accumulation: with ZeRO 0 and 1 let products add the gradients of matrices to where they lie, in layers
            that ask for it (``tds.linear``); not where torch has no product with a sum in that type.

    Attributes:
        gradient_factor: what the next step multiplies the gradients by, in the pass that clips them; 1 again after it.
        last_factor: what the last step multiplied them by, ahead of clipping: that, divided by the loss scale.
        raw_norm: ``norm_of_sums`` of the gradients that lie there, where somebody has asked for it already.
        overflow: the last step was skipped because fp16 gradients overflowed.
        judge: asked with the norm ahead of each update, overflows of fp16 aside; False leaves the weights as they
            are. It must answer the same on every rank. None: a norm that is not finite raises.
        was_refused: ``judge`` said False in the last step.
        fused: the parameters whose gradients products have added to where they lie.
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
        scaler: GradScaler | None = None,
        model: Group = SINGLE,
        tensor: Group = SINGLE,
        data: Group = SINGLE,
        expert_data: Group = SINGLE,
        zero_stage: int = 0,
        overlaps_sums: bool = False,
        offload: OffloadConfig = NOTHING,
        param_init: ParamInit | None = None,
        reduce_bucket_size: int = 0,
        allgather_bucket_size: int = 0,
        prefetches: bool = True,
        fuses_accumulation: bool = False,
    ) -> None:
        self.clip_grad = clip_grad
        self.scaler = scaler or GradScaler()
        self.model_group, self.tensor_group = model, tensor
        self.gradient_factor = self.last_factor = 1.0
        self.raw_norm: float | None = None
        self.overflow = False
        self.judge: Callable[[float], bool] | None = None
        self.was_refused = False
        self._global_grad_norm = 0.0
        self._masters = MainParams(
            data,
            expert_data,
            zero_stage=zero_stage,
            offload=offload,
            param_init=param_init,
            reduce_bucket_size=reduce_bucket_size,
            allgather_bucket_size=allgather_bucket_size,
        )
        if fuses_accumulation and zero_stage > 1:
            raise ValueError(
                f"--gradient-accumulation-fusion needs --zero-stage 0 or 1, got {zero_stage}, which keeps no whole "
                "gradients to add to. Leave one of them out"
            )
        self._gradients: Gradients = _kind_of_gradients(zero_stage, data, overlaps_sums)(self._masters)
        self._partial = SequenceParallelGradients(tensor)
        self._of_experts = ExpertGradients(expert_data)
        self._are_summed = False
        self._units: ParamUnits | None = None
        self._prefetches, self._fuses_accumulation = prefetches, fuses_accumulation
        self.fused: set[torch.nn.Parameter] = set()
        self._gathers: ParamGather | None = None
        masters = [{**group, "params": [self._register(p, dtype) for p in group["params"]]} for group in groups]
        self.inner = build(masters)
        super().__init__(self.inner.param_groups, {})

    @property
    def loss_scale(self) -> float:
        """The factor on the loss, for the backward pass of the next micro-batch."""
        return self.scaler.scale

    @property
    def gradient_source(self) -> EngineGradients:
        """What a pipeline's engine asks where gradients lie."""
        return EngineGradients(self)

    @property
    def grad_norm(self) -> float:
        """Norm of the last step's gradients before clipping, without loss scale."""
        return self._global_grad_norm

    def master_of(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """Return the tensor that the inner optimizer updates for ``parameter``; ``shard_of`` says where it lies."""
        return self._masters.of[parameter]

    def owns(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether this rank writes its master of ``parameter``, or a frozen one, into a checkpoint."""
        is_writer = self._masters.group_of(parameter).rank == 0 or self._masters.is_cut(parameter)
        return is_writer and is_counted_in_norm(parameter, self.tensor_group.rank)

    def finish_gathers(self) -> None:
        """Have the updated weights of all replicas here: for who reads them outside of the model's forward."""
        if self._gathers is not None:
            self._gathers.wait()

    def kept(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return what this rank keeps of ``parameter`` between two passes: with ZeRO 3 its part."""
        self.finish_gathers()
        return self._masters.homes.get(parameter, parameter)

    @property
    def gathers_weights(self) -> bool:
        """Whether weights are here in passes of the modules that have them only, and NaN between: ZeRO 3."""
        return self._units is not None

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed over the replicas here, within backward: the engine must not do it then."""
        return self._gradients.are_summed

    @property
    def cuts_gradients(self) -> bool:
        """Whether each replica keeps its parts of the gradients alone: from ZeRO 2 on."""
        return self._gradients.holders.size > 1

    def gradient_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the gradient accumulated for ``parameter``, zeros if no micro-batch has reached it yet.

        From ZeRO 2 on it is this replica's part, summed over the replicas; ``gradient_shard`` says where that lies.
        """
        return self._gradients.of(parameter) if parameter in self._masters.of else parameter.grad

    def gradient_shard(self, parameter: torch.nn.Parameter) -> Shard:
        """Return where ``gradient_of`` lies in the global tensor."""
        return self._gradients.shard(parameter) if parameter in self._masters.of else shard_of(parameter)

    def cut_weights(self, module: torch.nn.Module) -> None:
        """With ZeRO 3 keep parts of the weights of ``module`` from now on, and gather the rest where it is needed.

        With ZeRO 1 and 2 on NCCL let it wait for updated weights where it needs them.
        """
        if self._gathers is None:
            self._gathers = self._masters.gather_later(module)
        if self._masters.homes and self._units is None:
            pieces = self._masters.send_away()
            self._units = ParamUnits(module, pieces, self._masters.data_group, prefetches=self._prefetches)

    def weights_gathered(self) -> AbstractContextManager[None]:
        """Return a context in which every replica has all weights of its part, under ZeRO 3 too. Collective."""
        self.finish_gathers()
        return nullcontext() if self._units is None else self._units.gathered()

    def lay_gradients_out(self, order: BucketSchedule) -> Callable[[Bucket], Any] | None:
        """Let gradients lie in the buckets of an engine that sums them (``BufferedGradients.follow``)."""
        return self._gradients.follow(order) if isinstance(self._gradients, BufferedGradients) else None

    def begin_last_backward(self) -> None:
        """Take note that the next backward is the last of the step: sums over the replicas may start in it.

        An engine that lets them be summed here calls it, on all replicas.
        """
        self._gradients.begin_last_backward()

    def end_micro_batch(self) -> None:
        """Take note that a backward is through: from ZeRO 2 on gradients are summed, whole weights freed. Collective.

        An engine calls it after every backward.
        """
        if self._units is not None:
            self._units.end_micro_batch()
        self._gradients.end_micro_batch()

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        """Wait for the all-reduces over the replicas that started in the backward, then scale the gradients."""
        self._gradients.finish(factor)

    def sum_partial_gradients(self) -> None:
        """Add up, over the tensor ranks, what each has of its part of the sequence; of experts, over their replicas.

        Once for each step. Collective.

        ``norm_of_sums`` does it first; who reads gradients ahead of it calls this.
        """
        if self._are_summed:
            return
        self._are_summed = True
        self._partial.sum(self._gradients.of)
        self._of_experts.sum(self._gradients.of)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters, or skip when fp16 gradients have overflowed or ``judge`` refuses. Collective.

        Raises:
            NumericsError: the norm is not finite, and there is no loss scale to blame or it is at its smallest.
            ConfigError: with ZeRO 3, replicas did not call the same layers.
        """
        if self._units is not None:
            self._units.check()
        self.finish_gathers()
        self.last_factor, self.gradient_factor = self.gradient_factor / self.loss_scale, 1.0
        norm = (self.norm_of_sums().item() if self.raw_norm is None else self.raw_norm) * self.last_factor
        self._global_grad_norm = norm
        self.overflow = not math.isfinite(norm) and self.scaler.is_to_blame
        self.was_refused = not self.overflow and self._is_refused(norm)
        if not self.overflow and not self.was_refused:
            self._hand_to_masters(clip_coefficient(norm, self.clip_grad) * self.last_factor)
            self.update_masters()
            if self._masters.are_apart:
                self._send_weights()
        if not self.was_refused:
            self.scaler.update(self.overflow)
        self.zero_grad()

    def _send_weights(self) -> None:
        """Bring what the masters hold into the parameters, with ZeRO 1 and 2 on NCCL while the next forward runs."""
        if self._gathers is None:
            self.copy_masters_to_parameters()
            return
        self.zero_grad()  # ahead of the weights, which take the room of the gradients
        self._masters.to_parameters(self._gathers)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, of masters and parameters."""
        self.raw_norm = None
        self._gradients.clear()
        self._are_summed = False
        for parameter, master in self._masters.of.items():
            parameter.grad = None
            master.grad = None

    def copy_masters_to_parameters(self) -> None:
        """Bring what the masters hold into the parameters. With ZeRO collective over the replicas."""
        if self._units is not None:
            self._units.free()  # what is gathered would be of before
        self.finish_gathers()
        self._masters.to_parameters()

    @torch.no_grad()
    def update_masters(self) -> None:
        """Let the inner optimizer step on the gradients that the masters have, as they are."""
        with self._masters.contiguous() if self._masters.are_apart else nullcontext():
            self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        """Return masters, moments and loss scale of this rank, for checkpoints in DeepSpeed's layout.

        Raises:
            RuntimeError: with ZeRO, whose parts of masters no file of DeepSpeed's would hold.
        """
        if any(self._masters.is_cut(parameter) for parameter in self._masters.of):
            raise RuntimeError("a state_dict is of whole masters, got ZeRO: save with --checkpoint-format native")
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
        self.finish_gathers()
        self._masters.from_parameters()

    def gradients(self) -> Iterable[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return (parameter, gradient) pairs in the order of the groups."""
        return [(parameter, self._gradients.of(parameter)) for parameter in self._masters.of]

    def _register(self, parameter: torch.nn.Parameter, dtype: torch.dtype) -> torch.nn.Parameter:
        master = self._masters.register(parameter, dtype)
        self._gradients.register(parameter)
        if self._fuses_accumulation and can_add_products(parameter, accurate_dtype(dtype)):
            add_product = functools.partial(self._add_product, parameter)
            set_info(parameter, replace(info_of(parameter), add_product=add_product))
        self._partial.register(parameter)
        self._of_experts.register(parameter)
        return master

    def _add_product(self, parameter: torch.nn.Parameter, rows: torch.Tensor, inputs: torch.Tensor) -> None:
        assert isinstance(self._gradients, MainGradients)  # of ZeRO 0 and 1: __init__ has looked
        self.fused.add(parameter)
        self._gradients.add_product(parameter, rows, inputs)

    @functools.cached_property
    def gradient_holders(self) -> Group:
        """The replicas over which ``counted_gradients`` are summed; one alone where each has the whole of them."""
        return self._masters.data_group if self._of_experts.are_there else self._gradients.holders

    def counted_gradients(self) -> Iterable[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return the (parameter, gradient) pairs that this rank counts in sums over the model and the holders."""
        return [(p, self._gradients.of(p)) for p in self._counted]

    @functools.cached_property
    def _counted(self) -> list[torch.nn.Parameter]:
        """All but the experts count once over the replicas, and these once over those that have the same."""
        rank, counts = self.tensor_group.rank, self._gradients.is_counted_in_norm
        found = [p for p in self._masters.of if is_counted_in_norm(p, rank)]
        if not self._of_experts.are_there:
            return [p for p in found if counts(p)]
        is_whole = self._gradients.holders.size == 1
        return [
            p for p in found
            if (self._masters.group_of(p).rank == 0 if is_whole or is_reduced_apart(p) else counts(p))
        ]  # fmt: skip

    def norm_of_sums(self) -> torch.Tensor:
        """Return the norm of the summed gradients as they lie, with loss scale and without ``gradient_factor``.

        Collective. Nothing waits for it: it may be brought to the host together with other numbers.
        """
        if self.tensor_group.size > 1 or self._of_experts.are_there:
            self.sum_partial_gradients()
        counted = [gradient for _, gradient in self.counted_gradients()]
        device = next((parameter.device for parameter in self._masters.of), None)
        return global_norm(counted, [self.gradient_holders.handle, self.model_group.handle], device)

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
        if self.scaler.is_fixed:
            return (
                f"fp16 gradients must not overflow at the fixed --loss-scale {self.loss_scale:g}, got the norm {norm}. "
                "The weights are as before this step. Lower --loss-scale, or leave it out: a dynamic one skips such a "
                "step and halves itself. If they overflow at any scale, lower --lr or use bf16."
            )
        return (
            f"the gradient norm must be finite, got {norm}. The weights are as before this step. "
            "Lower --lr, or look at the batch."
        )

    def _hand_to_masters(self, factor: float) -> None:
        """Give each master its part of the gradient, times ``factor``."""
        parts = {master: self._gradients.part(p) for p, master in self._masters.of.items()}
        gradients = list(parts.values())
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        if self._masters.offload.optimizer:
            gradients = self._beside(parts)
        for master, gradient in zip(parts, gradients, strict=True):
            master.grad = gradient

    def _beside(self, parts: Mapping[torch.nn.Parameter, torch.Tensor]) -> list[torch.Tensor]:
        """Return each part where its master lies."""
        gradients = list(parts.values())
        if all(master.device == part.device for master, part in parts.items()):
            return gradients
        return self._masters.offload.copies(gradients)


def _kind_of_gradients(zero_stage: int, data: Group, overlaps_sums: bool) -> Callable[[MainParams], Gradients]:
    if data.size == 1:
        return MainGradients
    if zero_stage > 1:
        return PartitionedGradients
    return OverlappedMainGradients if overlaps_sums else BufferedGradients

"""GradReducer: accumulates the gradients of a step over its micro-batches and sums them over the replicas.

| subclass | used for | sum over the replicas |
|---|---|---|
| ``LocalGradReducer`` | one replica | none |
| ``AllReduceGradReducer`` | ZeRO 0 and 1 | after the last backward |
| ``AllReduceGradReducer`` in a pipeline | ZeRO 0 and 1 | none; the engine reduces, by ``tds.bucket_reducer`` |
| ``OverlappedGradReducer`` | ZeRO 0 and 1, --overlap-grad-reduce, no pipeline | starts during the last backward |
| ``ReduceScatterGradReducer`` | ZeRO 2 and 3 | during every backward; each replica keeps its shard |
| ``ReduceScatterGradReducer`` in a pipeline | ZeRO 2 and 3 | the same, started by ``tds.micro_batch_reducer`` |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import Shard, is_partial, shard_of
from megatron.optim.gradients.sum_group import SumGroup
from megatron.optim.param_store import ParamStore
from tds.bucket_reducer import Bucket, BucketSchedule
from tds.grad_norm import global_norm, is_counted_in_norm
from tds.gradients import is_reduced_by_optimizer, multiply


class GradReducer:
    """Gradients for all parameters in a ``ParamStore``.

    Args:
        store: the parameters and their main params.
        model, tensor: model-parallel group (one replica), and tensor-parallel group.

    Attributes:
        reduces_in_backward: True if ``end_micro_batch`` and backward reduce gradients, so that an engine must not.
        reduces_experts_in_backward: True if they also reduce the gradients of distributed experts.
        fused_params: parameters to whose gradients a fused layer has added a product (``add_product``).
    """

    reduces_in_backward = False
    reduces_experts_in_backward = False

    def __init__(self, store: ParamStore, model: Group = SINGLE, tensor: Group = SINGLE) -> None:
        self.fused_params: set[torch.nn.Parameter] = set()
        self.model_group = model
        self.tensor_group = tensor
        self._expert_tensor_group = tensor if store.expert_tensor_group is None else store.expert_tensor_group
        self._store = store
        self._sum_groups = [
            SumGroup(tensor, lambda p: is_partial(p) and not is_reduced_by_optimizer(p)),
            SumGroup(self._expert_tensor_group, lambda p: is_partial(p) and is_reduced_by_optimizer(p)),
        ]
        if not self.reduces_experts_in_backward:
            self._sum_groups.append(SumGroup(store.expert_group, is_reduced_by_optimizer))
        self._are_groups_summed = False

    # Accumulation.

    def register(self, parameter: torch.nn.Parameter) -> None:
        """Accumulate gradients for ``parameter``, which already has the training dtype."""
        for group in self._sum_groups:
            group.register(parameter)

    def use_buckets(self, order: BucketSchedule) -> Callable[[Bucket], Any] | None:
        """Store gradients in the buckets of an engine that reduces them.

        Returns:
            A function that starts the reduce-scatter of a bucket, or None if the engine all-reduces each bucket.
        """
        return None

    def grad(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return this rank's accumulated gradient, or zeros if no micro-batch has reached ``parameter``."""
        raise NotImplementedError

    def add_product(self, parameter: torch.nn.Parameter, rows: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add ``rows^T inputs``, a fused layer's gradient for ``parameter``, to the accumulated gradient."""
        raise NotImplementedError

    def begin_last_backward(self) -> None:
        """Announce the last backward of the step, during which reductions may start."""

    def end_micro_batch(self) -> None:
        """Complete a micro-batch after its backward. Collective if backward reduces gradients."""

    def finish(self, factor: float) -> None:
        """Complete the sums over the replicas and multiply the gradients by ``factor``. Collective."""
        if factor != 1.0:
            multiply([self.grad(parameter) for parameter in self._store.main_params], factor)

    def sum_over_groups(self) -> None:
        """Sum gradients over tensor ranks (sequence parallelism) and ranks with the same experts. Collective.

        ``norm`` calls this method. Code that reads gradients earlier must call it first. Further calls in a step have
        no effect.
        """
        if not self._are_groups_summed:
            self._are_groups_summed = True
            for group in self._sum_groups:
                group.sum(self.grad)

    def clear(self) -> None:
        """Discard all gradients."""
        self._are_groups_summed = False

    # Shards of gradients.

    @property
    def shard_group(self) -> Group:
        """The replicas among which gradients are sharded; a single rank if every replica has full gradients."""
        return SINGLE

    def has_grad_shard(self, parameter: torch.nn.Parameter) -> bool:
        """Return True if ``grad(parameter)`` is this replica's shard of the gradient."""
        return False

    def shard(self, parameter: torch.nn.Parameter) -> Shard:
        """Return the position of ``grad(parameter)`` in the global tensor."""
        return shard_of(self._store.main_params[parameter] if self.has_grad_shard(parameter) else parameter)

    def grad_of_main_param(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the main param's gradient, contiguous."""
        return self._store.local_shard(parameter, self.grad(parameter))

    # The norm counts each element of the model once.

    @cached_property
    def norm_group(self) -> Group:
        """Group of replicas over which a norm or another sum over ``counted_grads`` is all-reduced."""
        return self._store.data_group if self._has_experts else self.shard_group

    def norm(self) -> torch.Tensor:
        """Return the norm of the reduced gradients, on their device and not divided by the loss scale. Collective."""
        self.sum_over_groups()
        grads = [grad for _, grad in self.counted_grads()]
        device = next((parameter.device for parameter in self._store.main_params), None)
        return global_norm(grads, [self.norm_group.handle, self.model_group.handle], device)

    def counted_grads(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Return the (parameter, gradient) pairs that this rank contributes to the norm.

        Summed over ``norm_group`` and the ranks of a replica, each element of the model occurs once.
        """
        return [(parameter, self.grad(parameter)) for parameter in self._counted_params]

    @cached_property
    def _counted_params(self) -> list[torch.nn.Parameter]:
        return [p for p in self._store.main_params if self.is_first_in_tensor_group(p) and self._is_counted(p)]

    def tensor_group_of(self, parameter: torch.nn.Parameter) -> Group:
        """Return the tensor ranks over which ``parameter``, or the layer that contains it, is sharded."""
        return self._expert_tensor_group if is_reduced_by_optimizer(parameter) else self.tensor_group

    def is_first_in_tensor_group(self, parameter: torch.nn.Parameter) -> bool:
        """Return True if this rank holds a shard of ``parameter``, or the first of equal copies of tensor ranks."""
        return is_counted_in_norm(parameter, self.tensor_group_of(parameter).rank)

    def _is_counted(self, parameter: torch.nn.Parameter) -> bool:
        """Return True if this replica contributes the gradient to the norm."""
        if self.has_grad_shard(parameter):
            return True
        is_counted_once = self.norm_group.size == 1 and not is_reduced_by_optimizer(parameter)
        return is_counted_once or self._store.group_of(parameter).rank == 0

    @cached_property
    def _has_experts(self) -> bool:
        return any(map(is_reduced_by_optimizer, self._store.main_params))

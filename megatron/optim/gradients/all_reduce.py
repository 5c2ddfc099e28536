"""AllReduceGradReducer: gradients in a ``GradBuffer``, all-reduced in place (ZeRO 0 and 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.mpu.groups import SINGLE, Group
from megatron.optim.gradients.buffer import GradBuffer, uses_reduce_scatter
from megatron.optim.gradients.reducer import GradReducer
from megatron.optim.param_store import ParamStore
from megatron.optim.zero.partition import ParamPartition
from tds.bucket_reducer import AgreedOrder, Bucket, BucketSchedule
from tds.gradients import is_reduced_by_optimizer, reduce_gradients


class AllReduceGradReducer(GradReducer):
    """Accumulates full gradients and all-reduces them over the replicas.

    Without a pipeline ``finish`` all-reduces them after the last backward. In a pipeline this class only accumulates,
    and ``finish`` is not called. Instead the engine's ``tds.bucket_reducer.BucketReducer`` passes its buckets to
    ``use_buckets`` and all-reduces them from the last backward on (with ZeRO 1 on NCCL it reduce-scatters them).
    """

    def __init__(self, store: ParamStore, model: Group = SINGLE, tensor: Group = SINGLE) -> None:
        super().__init__(store, model, tensor)
        self._order = AgreedOrder(store.data_group.handle, store.bucket_numel)
        self.buffer = GradBuffer(self._order, store.data_group)

    def register(self, parameter: torch.nn.Parameter) -> None:
        super().register(parameter)
        if not is_reduced_by_optimizer(parameter):
            self._order.register(parameter)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(self._accumulate)

    def use_buckets(self, order: BucketSchedule) -> Callable[[Bucket], Any] | None:
        group = self._store.data_group
        is_scattered = self._store.is_sharded_over_replicas and uses_reduce_scatter(group)
        self.buffer = GradBuffer(order, group, self._partition if is_scattered else None)
        return self.buffer.start_reduce_scatter if is_scattered else None

    def grad(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        self.buffer.add(parameter)  # in case the parameter has no hook, for example because it was unfrozen later
        return self.buffer.main_grad(parameter)

    def add_product(self, parameter: torch.nn.Parameter, rows: torch.Tensor, inputs: torch.Tensor) -> None:
        self.fused_params.add(parameter)
        self.buffer.add_product(parameter, rows, inputs)

    def finish(self, factor: float) -> None:
        grads = [self.grad(p) for p in self._store.main_params if not is_reduced_by_optimizer(p)]
        reduce_gradients(grads, self._store.data_group.handle, factor)

    def clear(self) -> None:
        super().clear()
        self.buffer.clear()

    @property
    def shard_group(self) -> Group:
        return self._store.data_group if self.buffer.is_scattered else SINGLE

    def has_grad_shard(self, parameter: torch.nn.Parameter) -> bool:
        is_scattered = self.buffer.is_scattered and not is_reduced_by_optimizer(parameter)
        return is_scattered and self._store.is_sharded(parameter)

    def grad_of_main_param(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return self.grad(parameter) if self.has_grad_shard(parameter) else super().grad_of_main_param(parameter)

    def _partition(self, parameter: torch.nn.Parameter) -> ParamPartition | None:
        """Return a reduce-scattered gradient's partition; None for experts, which are summed over another group."""
        return None if is_reduced_by_optimizer(parameter) else self._store.partition(parameter)

    def _accumulate(self, parameter: torch.Tensor) -> None:
        self.buffer.add(parameter)  # type: ignore[arg-type]

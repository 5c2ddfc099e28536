"""ReduceScatterGradReducer: gradients are reduced during every backward, and each replica keeps its shards (ZeRO 2, 3).

A bucket is reduced as soon as backward has computed the gradients of all its weights. Only one bucket is reduced at a
time. A replica accumulates its shards over the micro-batches, in fp32. The memory of a step is therefore 4 / d bytes of
gradients per parameter, one or two buckets, and the gradients of an incomplete bucket.

Every micro-batch is reduced separately, as in DeepSpeed. Reducing only after the last micro-batch would require full
gradients, which ZeRO 2 is meant to avoid. With one micro-batch per step and a backend that reduces in the order of
ZeRO 0 (``reduction``), the sums are bitwise equal to those of ZeRO 0. With several micro-batches the order of the
additions differs.

The buckets are those of ZeRO 0, and all replicas reduce them in one order (``AgreedOrder``). Buckets that backward does
not fill are reduced at its end, with zeros for missing gradients.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.2.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import Shard, shard_of
from megatron.optim.gradients.reducer import GradReducer
from megatron.optim.gradients.reduction import LocalGrad, Reduction
from megatron.optim.param_store import ParamStore
from tds.bucket_reducer import AgreedOrder, Bucket
from tds.grad_norm import accurate_dtype
from tds.gradients import multiply


class ReduceScatterGradReducer(GradReducer):
    """Accumulates this replica's shards of all gradients."""

    reduces_in_backward = True

    def __init__(self, store: ParamStore, model: Group = SINGLE, tensor: Group = SINGLE) -> None:
        super().__init__(store, model, tensor)
        self._shards: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._arrived: dict[torch.Tensor, torch.Tensor | None] = {}
        self._order = AgreedOrder(store.data_group.handle, store.bucket_numel)
        self._pending: Reduction | None = None

    @property
    def shard_group(self) -> Group:
        return self._store.data_group

    def register(self, parameter: torch.nn.Parameter) -> None:
        super().register(parameter)
        parameter.register_post_accumulate_grad_hook(self._collect_grad)
        self._order.register(parameter)

    def grad(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter not in self._shards:
            partition, dtype = self._store.partition(parameter), accurate_dtype(parameter.dtype)
            shard = parameter if partition is None else partition.slice(parameter.detach(), self.shard_group.rank)
            self._shards[parameter] = torch.zeros_like(shard, dtype=dtype).contiguous()
        return self._shards[parameter]

    def shard(self, parameter: torch.nn.Parameter) -> Shard:
        return shard_of(self._store.main_params[parameter])

    def grad_of_main_param(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return self.grad(parameter)

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        self._reduce(self._order.pop_remaining())
        self._wait()
        self._order.reset()

    def finish(self, factor: float) -> None:
        multiply(self._shards.values(), factor)

    def clear(self) -> None:
        """Discard all gradients, including an interrupted backward's."""
        super().clear()
        self._wait()
        self._shards.clear()
        self._arrived.clear()
        self._order.reset()

    @torch.no_grad()
    def _collect_grad(self, parameter: torch.Tensor) -> None:
        """Move the gradient out of ``parameter.grad`` and reduce the buckets that it completes."""
        if not parameter.numel():  # it is in no bucket
            return
        if parameter in self._arrived or self._order.is_started(parameter):
            raise RuntimeError(
                "backward must compute the gradient of a weight once for each micro-batch, got one of shape "
                f"{tuple(parameter.shape)} twice: with --zero-stage 2 and 3 its reduction over the replicas may have "
                "started. Recompute with use_reentrant=False, or use --zero-stage 1"
            )
        self._arrived[parameter], parameter.grad = parameter.grad, None
        self._reduce(self._order.mark_ready(parameter))

    def _reduce(self, buckets: Iterable[Bucket]) -> None:
        """Start the reduction of each bucket, after the previous one has finished."""
        for bucket in buckets:
            self._wait()
            grads = [LocalGrad(self._arrived.pop(p, None), p, self._store.partition(p)) for p in bucket]
            self._pending = Reduction(grads, self.shard_group)

    def _wait(self) -> None:
        """Wait for the running reduction and accumulate this replica's shards."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        for parameter, shard in pending.shards():
            if parameter in self._shards:
                self._shards[parameter].add_(shard)
            else:
                self._shards[parameter] = shard

"""ReduceScatterGradReducer: gradients are reduced during every backward, and each replica keeps its shards (ZeRO 2, 3).

A bucket is reduced as soon as backward has computed the gradients of all its weights. Only one bucket is reduced at a
time. A replica accumulates its shards over the micro-batches, in fp32. The memory of a step is therefore 4 / d bytes of
gradients per parameter, one or two buckets, and the gradients of an incomplete bucket.

Every micro-batch is reduced separately, as in DeepSpeed. Reducing only after the last micro-batch would require full
gradients, which ZeRO 2 is meant to avoid. With one micro-batch per step and a backend that reduces in the order of
ZeRO 0 (``reduction``), the sums are bitwise equal to those of ZeRO 0. With several micro-batches the order of the
additions differs.

| parameters | reduced over |
|---|---|
| all except experts | the replicas |
| experts that other ranks hold too (expert-data parallelism) | the ranks with the same experts |
| experts that no other rank holds | nothing; their gradients accumulate on this rank |

Without a pipeline, the buckets are those of ZeRO 0, experts apart, and all replicas reduce them in one order
(``AgreedOrder``). Buckets that backward does not fill are reduced at its end, with zeros for missing gradients. In a
pipeline, the engine starts the buckets (``tds.micro_batch_reducer``): this class is its ``BackwardReduction``.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.2.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch

from megatron.mpu.groups import SINGLE, Group
from megatron.optim.gradients.reducer import GradReducer
from megatron.optim.gradients.reduction import LocalGrad, Reduction
from megatron.optim.param_store import ParamStore
from tds.bucket_reducer import AgreedOrder, Bucket
from tds.grad_norm import accurate_dtype
from tds.gradients import is_reduced_by_optimizer, multiply


class ReduceScatterGradReducer(GradReducer):
    """Accumulates this replica's shards of all gradients.

    Args:
        has_pipeline: an engine starts the reductions, by ``start``. Otherwise hooks and ``end_micro_batch`` start them.
    """

    reduces_in_backward = True
    reduces_experts_in_backward = True

    def __init__(
        self, store: ParamStore, model: Group = SINGLE, tensor: Group = SINGLE, *, has_pipeline: bool = False
    ) -> None:
        super().__init__(store, model, tensor)
        self._shards: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._arrived: dict[torch.Tensor, torch.Tensor | None] = {}
        self._has_pipeline = has_pipeline
        self._order = AgreedOrder(store.data_group.handle, store.bucket_numel, is_reduced_by_optimizer)
        self._pending: Reduction | None = None

    @property
    def shard_group(self) -> Group:
        return self._store.data_group

    def register(self, parameter: torch.nn.Parameter) -> None:
        super().register(parameter)
        parameter.register_post_accumulate_grad_hook(self._collect_grad)
        if self.bucket_key(parameter) is not None:
            self._order.register(parameter)

    def grad(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter not in self._shards:
            partition, dtype = self._store.partition(parameter), accurate_dtype(parameter.dtype)
            rank = self._store.group_of(parameter).rank
            shard = parameter if partition is None else partition.slice(parameter.detach(), rank)
            self._shards[parameter] = torch.zeros_like(shard, dtype=dtype).contiguous()
        return self._shards[parameter]

    def has_grad_shard(self, parameter: torch.nn.Parameter) -> bool:
        return self._store.is_sharded(parameter)

    def grad_of_main_param(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return self.grad(parameter)

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        self._reduce(self._order.pop_remaining())
        self._wait()
        self._order.reset()

    @torch.no_grad()
    def finish(self, factor: float | torch.Tensor) -> None:
        self._wait()
        multiply(self._shards.values(), factor)

    # ``tds.micro_batch_reducer.BackwardReduction``, for a pipeline engine.

    def bucket_key(self, parameter: torch.nn.Parameter) -> Hashable | None:
        """Return the group over which the gradient is reduced, by type; None: no other rank has the parameter."""
        if self._store.group_of(parameter).size == 1:
            return None
        return "experts" if is_reduced_by_optimizer(parameter) else "replicas"

    @torch.no_grad()
    def start(self, bucket: Bucket) -> None:
        """Start the reduction of the gradients that have arrived in ``bucket``. Collective."""
        self._reduce([bucket])

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
        if self._has_pipeline or self.bucket_key(parameter) is None:  # type: ignore[arg-type]
            self._add_grad(parameter)
            return
        if parameter in self._arrived or self._order.is_started(parameter):
            raise RuntimeError(
                "backward must compute the gradient of a weight once for each micro-batch, got one of shape "
                f"{tuple(parameter.shape)} twice: with --zero-stage 2 and 3 its reduction over the replicas may have "
                "started. Recompute with use_reentrant=False, or use --zero-stage 1"
            )
        self._arrived[parameter], parameter.grad = parameter.grad, None
        self._reduce(self._order.mark_ready(parameter))

    def _add_grad(self, parameter: torch.Tensor) -> None:
        """Add the gradient in ``parameter.grad`` to those that await a reduction, or to this rank's sum."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if self.bucket_key(parameter) is None:  # type: ignore[arg-type]
            self.grad(parameter).add_(gradient)  # type: ignore[arg-type]
            return
        waiting = self._arrived.get(parameter)
        if waiting is None:
            self._arrived[parameter] = gradient
        else:  # deferred weight gradients: the gradient of another micro-batch, or of another use of the weight
            dtype = accurate_dtype(parameter.dtype)
            self._arrived[parameter] = waiting.to(dtype).add_(gradient)

    def _reduce(self, buckets: Iterable[Bucket]) -> None:
        """Start the reduction of each bucket, after the previous one has finished."""
        for bucket in buckets:
            self._wait()
            grads = [LocalGrad(self._arrived.pop(p, None), p, self._store.partition(p)) for p in bucket]
            self._pending = Reduction(grads, self._store.group_of(bucket[0]))

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

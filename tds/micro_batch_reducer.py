"""MicroBatchReducer: gradient reductions over the replicas in every backward of a pipeline stage (ZeRO 2 and 3).

``tds.bucket_reducer.BucketReducer`` all-reduces gradients once per step, after they have been accumulated over the
micro-batches. An optimizer that stores only its shards of the gradients reduces them in every backward instead:

| action | reduced |
|---|---|
| ``Backward`` | each bucket of the chunk as soon as backward has filled it |
| ``BackwardInput`` | nothing; the gradients that it computes wait for the next ``BackwardWeight`` of the chunk |
| ``BackwardWeight`` | each bucket of the chunk as soon as the deferred gradients fill it |

Each of these actions reduces every bucket of its chunk once, with zeros for missing gradients, so the replicas start
the same collectives in the same order. A weight that several chunks use is reduced with each of them. The sums over the
copies of a tied weight follow at the end of the step and contain only the shards.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.2.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from tds.bucket_reducer import Bucket, BucketReducer, BucketSchedule
from tds.grad_norm import accurate_dtype
from tds.gradients import make_buckets


class BackwardReduction(Protocol):
    """An optimizer's reduction of gradients to its shards, which the engine starts bucket by bucket."""

    def bucket_key(self, parameter: torch.nn.Parameter) -> Hashable | None:
        """Return a key that the parameters of a bucket share; None: the gradient is not reduced."""

    def start(self, bucket: Bucket) -> None:
        """Start the reduction of the gradients that have arrived since the bucket's last reduction. Collective."""

    def finish(self, factor: float | torch.Tensor) -> None:
        """Wait for the running reductions and multiply this replica's shards by ``factor``."""


class MicroBatchOrder(BucketSchedule):
    """The buckets of each chunk, from its last layer to its first. ``select`` chooses the chunk of a backward.

    Weights that belong to no chunk are late: they are reduced once, at the end of the step.

    Args:
        parameters: all the stage's parameters.
        chunks: each chunk's parameters, in layer order.
        reduction: provides the keys by which parameters are separated into buckets.
        bucket_numel: maximum elements per bucket; None: limit the bytes by ``BUCKET_BYTES``.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        chunks: Sequence[Sequence[torch.nn.Parameter]],
        reduction: BackwardReduction,
        bucket_numel: int | None = None,
    ) -> None:
        super().__init__()
        self._reduction, self._bucket_numel = reduction, bucket_numel
        self._parameters = [p for p in dict.fromkeys(parameters) if reduction.bucket_key(p) is not None]
        reduced = set(self._parameters)
        self._chunks = [[p for p in dict.fromkeys(reversed(chunk)) if p in reduced] for chunk in chunks]
        self._trainable_ids: set[int] | None = None
        self.reset()

    def chunk_parameters(self, chunk: int) -> Sequence[torch.nn.Parameter]:
        return self._chunk_parameters[chunk]

    def select(self, chunk: int) -> None:
        """Begin a backward of ``chunk``, with none of its gradients final."""
        self._set_buckets(self._chunk_buckets[chunk])

    def all_buckets(self) -> list[Bucket]:
        """Return the buckets of all chunks and the late ones; a weight that several chunks use occurs repeatedly."""
        return [*(bucket for buckets in self._chunk_buckets for bucket in buckets), *self.late]

    def reset(self) -> None:
        """Start a new step. Parameters may have been frozen or unfrozen since the previous one."""
        self._set_buckets([])
        trainable_ids = {id(p) for p in self._parameters if p.requires_grad}
        if trainable_ids == self._trainable_ids:
            return
        self._trainable_ids = trainable_ids
        in_chunks = {p for chunk in self._chunks for p in chunk}
        self._chunk_parameters = [[p for p in chunk if p.requires_grad] for chunk in self._chunks]
        self._chunk_buckets = [list(self._make_buckets(params)) for params in self._chunk_parameters]
        self.late = list(self._make_buckets([p for p in self._parameters if p.requires_grad and p not in in_chunks]))

    def _make_buckets(self, parameters: Bucket) -> Iterator[Bucket]:
        def key(parameter: torch.nn.Parameter) -> Hashable:
            return accurate_dtype(parameter.dtype), self._reduction.bucket_key(parameter)

        if self._bucket_numel is not None:
            return make_buckets(parameters, torch.Tensor.numel, key, self._bucket_numel)
        return make_buckets(parameters, lambda p: p.numel() * accurate_dtype(p.dtype).itemsize, key)


class MicroBatchReducer(BucketReducer):
    """Starts a ``BackwardReduction`` bucket by bucket in every backward of a step.

    Args:
        order: the buckets of each chunk.
        reduction: reduces the buckets.
        starts_early: start a bucket while backward runs; otherwise all start after it, with equal results.
    """

    reduces_every_backward = True

    def __init__(self, order: MicroBatchOrder, reduction: BackwardReduction, *, starts_early: bool = True) -> None:
        super().__init__(order, lambda parameter: parameter, None, starts_early=starts_early, scatter=reduction.start)
        self._micro_batch_order, self._reduction = order, reduction
        self._chunk: int | None = None

    def begin_last_backward(self, chunk: int = 0) -> None:
        self._select(chunk)
        super().begin_last_backward(chunk)

    def register_chunk_ready(self, chunk: int, excluded: Iterable[torch.Tensor] = ()) -> None:
        self._select(chunk)
        super().register_chunk_ready(chunk, excluded)

    def end_backward(self) -> None:
        """Start the remaining buckets of the chunk, and prepare for the next backward. Collective."""
        self._start(self.order.pop_remaining())
        self._ready_parameters.clear()
        self._chunk = None

    def wait(self, scale: float | torch.Tensor) -> None:
        """Wait for the running reductions and multiply the shards by ``scale``."""
        self._reduction.finish(scale)
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._chunk = None

    def _select(self, chunk: int) -> None:
        if self._chunk != chunk:
            self._micro_batch_order.select(chunk)
            self._chunk = chunk

    def _start(self, ready_buckets: Iterable[Bucket]) -> None:
        for bucket in ready_buckets:
            self._reduction.start(bucket)

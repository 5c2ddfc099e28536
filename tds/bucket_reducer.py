"""BucketReducer: gradient all-reduces over the replicas that start during a step's last backward.

In the last backward, gradients become final one by one, from the last layer to the first. They are sent in buckets. A
bucket starts when its last gradient is final and all previous buckets have started: all replicas must start buckets in
the same order (``ChunkOrder``, ``AgreedOrder``), even if their gradients become final in different orders. The
all-reduces thus overlap with the backward, except for the first layer's. The results are bitwise equal to
``reduce_gradients`` after the backward.

A gradient to which autograd adds twice in one backward (a weight shared by several layers, under reentrant recompute)
could be sent incomplete. This raises an error if its bucket has already started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tds.backward_state import will_reach
from tds.grad_norm import accurate_dtype
from tds.gradients import GradientBucket, make_buckets

Bucket = list[torch.nn.Parameter]


class BucketSchedule:
    """The order in which buckets are all-reduced, equal on every replica.

    In each step, every bucket except the late ones is returned exactly once, by ``mark_ready`` or by ``pop_remaining``.
    ``reset`` starts the next step.
    """

    late: Sequence[Bucket] = ()
    """Buckets that are all-reduced after all others, once their gradients are complete."""

    def __init__(self) -> None:
        self._set_buckets([])

    def chunk_parameters(self, chunk: int) -> Sequence[torch.nn.Parameter]:
        """List the parameters of ``chunk`` whose gradients are final after the chunk's last backward."""
        raise NotImplementedError

    def all_buckets(self) -> list[Bucket]:
        """Return all buckets, including the late ones."""
        return [*self._buckets, *self.late]

    def is_started(self, parameter: torch.Tensor) -> bool:
        """Return True if ``mark_ready`` or ``pop_remaining`` has returned the bucket of ``parameter`` in this step."""
        return parameter in self._bucket_idx_of and self._bucket_idx_of[parameter] < self._next_idx

    def mark_ready(self, parameter: torch.Tensor) -> list[Bucket]:
        """Register that the gradient of ``parameter`` is final; return the buckets that can start now.

        Must be called once per parameter and step.
        """
        bucket_idx = self._bucket_idx_of.get(parameter)
        if bucket_idx is None:  # an empty parameter, or one in a late bucket
            return []
        self._num_missing[bucket_idx] -= 1
        end = self._next_idx
        while end < len(self._buckets) and not self._num_missing[end]:
            end += 1
        return self._pop_until(end)

    def pop_remaining(self) -> list[Bucket]:
        """Return the remaining buckets, which are incomplete because a parameter got no gradient on this rank."""
        return self._pop_until(len(self._buckets))

    def reset(self) -> None:
        """Start a new step, and forget which gradients have arrived, also if the backward was interrupted."""
        self._next_idx, self._num_missing = 0, [len(bucket) for bucket in self._buckets]

    def _pop_until(self, end: int) -> list[Bucket]:
        first, self._next_idx = self._next_idx, max(self._next_idx, end)
        return self._buckets[first:end]

    def _set_buckets(self, buckets_in_order: list[Bucket]) -> None:
        self._buckets = buckets_in_order
        self._bucket_idx_of: dict[torch.Tensor, int] = {
            p: bucket_idx for bucket_idx, bucket in enumerate(buckets_in_order) for p in bucket
        }
        self._next_idx, self._num_missing = 0, [len(bucket) for bucket in buckets_in_order]


class ChunkOrder(BucketSchedule):
    """A pipeline stage's order: last chunk first, and each chunk from its last layer to its first.

    The all-reduces of chunks that finish early thus overlap with the work of the other chunks. Parameters that do not
    belong to exactly one chunk are late: tied weights, whose copies on several stages are summed first, weights that
    several chunks share, and weights outside of layers.

    Args:
        parameters: all the stage's parameters.
        chunks: each chunk's parameters, in layer order.
        tied: parameters with copies on other stages.
        bucket_bytes: maximum bucket size (default ``BUCKET_BYTES``).
        bucket_numel: maximum elements per bucket; None: limit the bytes instead.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        chunks: Sequence[Sequence[torch.nn.Parameter]],
        tied: Iterable[torch.nn.Parameter] = (),
        bucket_bytes: int | None = None,
        bucket_numel: int | None = None,
    ) -> None:
        super().__init__()
        self._bucket_bytes, self._bucket_numel = bucket_bytes, bucket_numel
        self._parameters = list(dict.fromkeys(parameters))
        self._chunks = [list(dict.fromkeys(reversed(chunk))) for chunk in chunks]
        num_chunks_of = Counter(p for chunk in self._chunks for p in chunk)
        self._late_parameters = {p for p in self._parameters if num_chunks_of[p] != 1} | set(tied)
        self._trainable_ids: set[int] | None = None
        self.reset()

    def chunk_parameters(self, chunk: int) -> Sequence[torch.nn.Parameter]:
        return self._chunk_parameters[chunk]

    def reset(self) -> None:
        """Start a new batch. Parameters may have been frozen or unfrozen since the previous one."""
        trainable_ids = {id(p) for p in self._parameters if p.requires_grad}
        if trainable_ids == self._trainable_ids:
            super().reset()
            return
        self._trainable_ids, late = trainable_ids, self._late_parameters
        self.late = list(self._make_buckets([p for p in self._parameters if p in late and p.requires_grad]))
        self._chunk_parameters = [[p for p in chunk if p.requires_grad and p not in late] for chunk in self._chunks]
        self._set_buckets(
            [bucket for params in reversed(self._chunk_parameters) for bucket in self._make_buckets(params)]
        )

    def _make_buckets(self, parameters: Bucket) -> Iterator[Bucket]:
        if self._bucket_numel is None:
            return make_buckets(parameters, limit=self._bucket_bytes)
        return make_buckets(parameters, torch.Tensor.numel, limit=self._bucket_numel)


class AgreedOrder(BucketSchedule):
    """The order in which the first backward filled the buckets, agreed over the replicas.

    The parameters are bucketed as by ``reduce_gradients`` for 32-bit or 64-bit gradients. The bucket order is first
    guessed: last weights first, and buckets with all layers' biases or norms at the end. The replicas then correct it
    twice during the first backward (``_agreed`` counts the corrections):

    1. At the first gradient, buckets with a weight that autograd's graph will not reach on some replica move to the
       end. Such a bucket is never filled and would block all later ones.
    2. At the end of the backward, the buckets are sorted in the order in which they were filled.

    ``mark_ready`` and ``pop_remaining`` are therefore collective in the first backward, and only there.

    Args:
        group: process group of the replicas.
        bucket_numel_of: returns the maximum elements per bucket on a device, or None to limit its bytes by
            ``BUCKET_BYTES``.
        key_of: returns a key that the parameters of a bucket share, in addition to their dtype.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        bucket_numel_of: Callable[[torch.device], int | None] = lambda device: None,
        key_of: Callable[[torch.Tensor], Hashable] = lambda parameter: None,
    ) -> None:
        super().__init__()
        self._bucket_numel_of, self._key_of = bucket_numel_of, key_of
        self._parameters: list[torch.nn.Parameter] = []
        self._group = group
        self._initial_buckets: list[Bucket] = []
        self._fill_order: list[int] = []  # indices of filled buckets, in first-backward order
        self._agreed = 0  # how often the order was agreed; at most twice

    def register(self, parameter: torch.nn.Parameter) -> None:
        """Include ``parameter`` in a bucket. All parameters must be registered before the first backward."""
        self._parameters.append(parameter)

    def chunk_parameters(self, chunk: int) -> Sequence[torch.nn.Parameter]:
        return self._parameters

    def all_buckets(self) -> list[Bucket]:
        return super().all_buckets() or list(self._make_buckets())

    def mark_ready(self, parameter: torch.Tensor) -> list[Bucket]:
        if not self._agreed:
            self._agree([int(not all(map(will_reach, bucket))) for bucket in self._set_initial_buckets()])
        startable = super().mark_ready(parameter)
        bucket_idx = self._bucket_idx_of.get(parameter)
        if self._agreed == 1 and bucket_idx is not None and not self._num_missing[bucket_idx]:
            self._fill_order.append(bucket_idx)
        return startable

    def pop_remaining(self) -> list[Bucket]:
        if not self._agreed:
            self._agree([1] * len(self._set_initial_buckets()))
        remaining = super().pop_remaining()
        if self._agreed == 1:
            fill_position = {idx: position for position, idx in enumerate(self._fill_order)}
            self._agree([fill_position.get(idx, len(self._buckets)) for idx in range(len(self._buckets))])
            super().pop_remaining()
        return remaining

    def reset(self) -> None:
        super().reset()
        self._fill_order.clear()

    def _set_initial_buckets(self) -> list[Bucket]:
        position = {parameter: idx for idx, parameter in enumerate(self._parameters)}
        self._initial_buckets = sorted(self._make_buckets(), key=lambda bucket: -position[bucket[0]])
        self._initial_buckets.sort(key=lambda bucket: bucket[-1].dim() < 2)  # all layers' biases and norms come last
        self._set_buckets(self._initial_buckets)
        return self._initial_buckets

    def _agree(self, sort_keys: list[int]) -> None:
        """Sort the buckets by their maximum sort key over the replicas. Collective.

        Args:
            sort_keys: this replica's sort key for each bucket, in the current bucket order.
        """
        self._agreed += 1
        if not sort_keys:
            return
        max_keys = torch.tensor(sort_keys, dtype=torch.int32, device=self._parameters[0].device)
        dist.all_reduce(max_keys, dist.ReduceOp.MAX, group=self._group)
        agreed_keys = max_keys.tolist()
        self._set_buckets(sorted(self._initial_buckets, key=lambda bucket: agreed_keys[self._bucket_idx_of[bucket[0]]]))

    def _make_buckets(self) -> Iterator[Bucket]:
        """Yield buckets for 32-bit or 64-bit gradients; on a CPU, they equal those in ``reduce_gradients``."""
        parameters = self._parameters

        def key(parameter: torch.nn.Parameter) -> Hashable:
            return accurate_dtype(parameter.dtype), self._key_of(parameter)

        num_elements = self._bucket_numel_of(parameters[0].device) if parameters else None
        if num_elements is not None:
            return make_buckets(parameters, torch.Tensor.numel, key, num_elements)
        return make_buckets(parameters, lambda p: p.numel() * accurate_dtype(p.dtype).itemsize, key)


class BucketReducer:
    """All-reduces a step's gradients over the replicas, partly during ``last_backward``; ``finish`` waits for all.

    Args:
        order: the bucket order.
        gradient_of: returns a parameter's accumulated gradient, zeros if there is none.
        group: process group of the replicas.
        dtype: dtype in which gradients are sent and summed; None: the gradients' dtype.
        starts_early: start all-reduces during the last backward. Otherwise all start after it, with equal results.
        error_hint: advice in the error for a gradient that arrives after its all-reduce has started.
        scatter: starts a bucket's reduce-scatter; None: all-reduce the gradients.

    Attributes:
        reduces_every_backward: False; ``tds.micro_batch_reducer`` has the subclass for which it is True.
    """

    reduces_every_backward = False

    def __init__(
        self,
        order: BucketSchedule,
        gradient_of: Callable[[Any], torch.Tensor],
        group: Any,
        *,
        dtype: torch.dtype | None = None,
        starts_early: bool = True,
        error_hint: str = "Recompute with use_reentrant=False",
        scatter: Callable[[Bucket], Any] | None = None,
    ) -> None:
        self.order = order
        self.dtype = dtype
        self.starts_early = starts_early
        self._gradient_of = gradient_of
        self._group = group
        self._error_hint = error_hint
        self._scatter = scatter
        self._hooks: list[Any] = []
        self._ready_parameters: set[torch.Tensor] = set()
        self._pending: list[Any] = []  # ``GradientBucket`` or the value that ``scatter`` returns

    @property
    def is_scattered(self) -> bool:
        """True if each replica gets only its gradient shards."""
        return self._scatter is not None

    @contextmanager
    def last_backward(self, chunk: int = 0) -> Iterator[None]:
        """Start each bucket's all-reduce as soon as the backward in the block fills it.

        The block must contain the step's last backward of ``chunk``, because it makes the chunk's gradients final.

        Raises:
            RuntimeError: the backward added to a gradient after its all-reduce had started.
        """
        self.begin_last_backward(chunk)
        try:
            yield
        finally:
            self.end_last_backward()

    def begin_last_backward(self, chunk: int = 0) -> None:
        """Register the hooks of ``last_backward``; ``end_last_backward`` removes them."""
        parameters = self.order.chunk_parameters(chunk) if self.starts_early else ()
        self._hooks += [
            p.register_post_accumulate_grad_hook(self._on_grad_accumulated) for p in parameters if p.requires_grad
        ]

    def end_last_backward(self) -> None:
        """Remove the hooks of ``begin_last_backward``."""
        while self._hooks:
            self._hooks.pop().remove()

    def _on_grad_accumulated(self, parameter: torch.Tensor) -> None:
        if parameter in self._ready_parameters and self.order.is_started(parameter):
            raise RuntimeError(
                f"the gradient of a weight of shape {tuple(parameter.shape)} was accumulated twice in one backward, "
                f"the second time after its all-reduce over the replicas had started. {self._error_hint}"
            )
        self.mark_ready(parameter)

    def mark_ready(self, parameter: torch.Tensor) -> None:
        """Register that the gradient of ``parameter`` is final, and start the buckets that are complete."""
        if self.starts_early and parameter not in self._ready_parameters:
            self._ready_parameters.add(parameter)
            self._start(self.order.mark_ready(parameter))

    def register_chunk_ready(self, chunk: int, excluded: Iterable[torch.Tensor] = ()) -> None:
        """Register that all gradients in ``chunk``, except ``excluded``, are final."""
        excluded_set = set(excluded)
        for parameter in self.order.chunk_parameters(chunk):
            if parameter not in excluded_set:
                self.mark_ready(parameter)

    def end_backward(self) -> None:
        """Complete a chunk's last backward of the step, after ``register_chunk_ready``."""

    def start_remaining(self) -> None:
        """Start the remaining buckets, except the late ones. Collective.

        Must be called before the group's other collectives, so that all replicas run them in the same order.
        """
        self._start(self.order.pop_remaining())

    def finish(self, scale: float | torch.Tensor) -> None:
        """Start all remaining buckets, wait for all results and multiply them by ``scale``. Collective."""
        self.start_remaining()
        self._start(self.order.late)
        self.wait(scale)

    def wait(self, scale: float | torch.Tensor) -> None:
        """Wait for the running all-reduces, multiply their results by ``scale``, and reset."""
        for bucket in self._pending:
            bucket.wait(scale)
        self._pending.clear()
        self.reset()

    def reset(self) -> None:
        """Start a new batch; wait for an interrupted backward's all-reduces and discard its state."""
        self.end_last_backward()
        for bucket in self._pending:
            bucket.work.wait()
        self._pending.clear()
        self._ready_parameters.clear()
        self.order.reset()

    @torch.no_grad()
    def _start(self, ready_buckets: Iterable[Bucket]) -> None:
        for bucket in ready_buckets:
            if self._scatter is not None:
                self._pending.append(self._scatter(bucket))
                continue
            gradients = [self._gradient_of(p) for p in bucket]
            self._pending.append(GradientBucket.start_all_reduce(gradients, self._group, self.dtype))

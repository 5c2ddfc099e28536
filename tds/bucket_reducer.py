"""BucketReducer: all-reduces of gradients over the replicas that start during the last backward of a step.

In the last backward, gradients become final one by one, from the last layer to the first. They are sent in buckets. A
bucket starts when its last gradient is final and all previous buckets have started: all replicas must start buckets in
the same order (``ChunkOrder``, ``AgreedOrder``), even if their gradients become final in different orders. The
all-reduces of all layers except the first thus overlap with the backward. The results are bitwise equal to the results
of ``reduce_gradients`` after the backward.

A gradient to which autograd adds twice in one backward (a weight shared by several layers, under reentrant recompute)
could be sent incomplete. This raises an error if its bucket has already started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tds.backward_state import will_reach
from tds.grad_norm import accurate_dtype
from tds.gradients import GradientBucket, buckets

Bucket = list[torch.nn.Parameter]


class BucketSchedule:
    """The order in which buckets are all-reduced, equal on every replica.

    In each step, every bucket except the late ones is returned exactly once, by ``arrived`` or by ``rest``. ``reset``
    starts the next step.
    """

    late: Sequence[Bucket] = ()
    """Buckets that are all-reduced after all others, once their gradients are complete."""

    def __init__(self) -> None:
        self._arrange([])

    def of_chunk(self, chunk: int) -> Sequence[torch.nn.Parameter]:
        """Return the parameters of ``chunk`` whose gradients are final after the chunk's last backward."""
        raise NotImplementedError

    def every(self) -> list[Bucket]:
        """Return all buckets, including the late ones."""
        return [*self._buckets, *self.late]

    def is_taken(self, parameter: torch.Tensor) -> bool:
        """Return True if ``arrived`` or ``rest`` has returned the bucket of ``parameter`` in this step."""
        return parameter in self._number_of and self._number_of[parameter] < self._next

    def arrived(self, parameter: torch.Tensor) -> list[Bucket]:
        """Register that the gradient of ``parameter`` is final; return the buckets that can start now.

        Must be called once per parameter and step.
        """
        bucket_idx = self._number_of.get(parameter)
        if bucket_idx is None:  # an empty parameter, or one in a late bucket
            return []
        self._missing[bucket_idx] -= 1
        end = self._next
        while end < len(self._buckets) and not self._missing[end]:
            end += 1
        return self._take_up_to(end)

    def rest(self) -> list[Bucket]:
        """Return the remaining buckets, which are incomplete because a parameter got no gradient on this rank."""
        return self._take_up_to(len(self._buckets))

    def reset(self) -> None:
        """Start a new step, and forget which gradients have arrived, also if the backward was interrupted."""
        self._next, self._missing = 0, [len(bucket) for bucket in self._buckets]

    def _take_up_to(self, end: int) -> list[Bucket]:
        first, self._next = self._next, max(self._next, end)
        return self._buckets[first:end]

    def _arrange(self, order: list[Bucket]) -> None:
        self._buckets = order
        self._number_of: dict[torch.Tensor, int] = {p: n for n, bucket in enumerate(order) for p in bucket}
        self._next, self._missing = 0, [len(bucket) for bucket in order]


class ChunkOrder(BucketSchedule):
    """The order of a pipeline stage: last chunk first, and each chunk from its last layer to its first.

    The all-reduces of chunks that finish early thus overlap with the work of the other chunks. Parameters that do not
    belong to exactly one chunk are late: tied weights, whose copies on several stages are summed first, weights that
    several chunks share, and weights outside of layers.

    Args:
        every: all parameters of the stage.
        chunks: the parameters of each chunk, in the order of its layers.
        tied: parameters with copies on other stages.
        bucket_bytes: maximum size of a bucket; None: ``BUCKET_BYTES``.
        numbers: maximum number of elements of a bucket; None: limit the bytes instead.
    """

    def __init__(
        self,
        every: Iterable[torch.nn.Parameter],
        chunks: Sequence[Sequence[torch.nn.Parameter]],
        tied: Iterable[torch.nn.Parameter] = (),
        bucket_bytes: int | None = None,
        numbers: int | None = None,
    ) -> None:
        super().__init__()
        self._bucket_bytes, self._numbers = bucket_bytes, numbers
        self._every = list(dict.fromkeys(every))
        self._chunks = [list(dict.fromkeys(reversed(chunk))) for chunk in chunks]
        holders = Counter(p for chunk in self._chunks for p in chunk)
        self._not_of_one = {p for p in self._every if holders[p] != 1} | set(tied)
        self._trained: set[int] | None = None
        self.reset()

    def of_chunk(self, chunk: int) -> Sequence[torch.nn.Parameter]:
        return self._of_chunk[chunk]

    def reset(self) -> None:
        """Start a new batch. Parameters may have been frozen or unfrozen since the previous one."""
        trained = {id(p) for p in self._every if p.requires_grad}
        if trained == self._trained:
            super().reset()
            return
        self._trained, late = trained, self._not_of_one
        self.late = list(self._buckets_of([p for p in self._every if p in late and p.requires_grad]))
        self._of_chunk = [[p for p in chunk if p.requires_grad and p not in late] for chunk in self._chunks]
        self._arrange([bucket for params in reversed(self._of_chunk) for bucket in self._buckets_of(params)])

    def _buckets_of(self, parameters: Bucket) -> Iterator[Bucket]:
        if self._numbers is None:
            return buckets(parameters, limit=self._bucket_bytes)
        return buckets(parameters, torch.Tensor.numel, limit=self._numbers)


class AgreedOrder(BucketSchedule):
    """The order in which the first backward filled the buckets, agreed over the replicas.

    The parameters are bucketed as by ``reduce_gradients`` for gradients of 32 or 64 bits. The order of the buckets is
    first guessed: last weights first, and buckets with biases or norms of all layers at the end. The replicas then
    correct it twice during the first backward (``_agreed`` counts the corrections):

    1. At the first gradient, buckets with a weight that autograd's graph will not reach on some replica move to the
       end. Such a bucket is never filled and would block all later ones.
    2. At the end of the backward, the buckets are sorted in the order in which they were filled.

    ``arrived`` and ``rest`` are therefore collective in the first backward, and only there.

    Args:
        group: process group of the replicas.
        numbers: returns the maximum number of elements of a bucket on a device, or None to limit its bytes by
            ``BUCKET_BYTES``.
    """

    def __init__(
        self, group: dist.ProcessGroup, numbers: Callable[[torch.device], int | None] = lambda place: None
    ) -> None:
        super().__init__()
        self._numbers = numbers
        self._parameters: list[torch.nn.Parameter] = []
        self._group = group
        self._guess: list[Bucket] = []
        self._filled: list[int] = []  # indices of filled buckets, in the order of the first backward
        self._agreed = 0  # number of agreements on the order; at most two

    def register(self, parameter: torch.nn.Parameter) -> None:
        """Include ``parameter`` in a bucket. All parameters must be registered before the first backward."""
        self._parameters.append(parameter)

    def of_chunk(self, chunk: int) -> Sequence[torch.nn.Parameter]:
        return self._parameters

    def every(self) -> list[Bucket]:
        return super().every() or list(self._buckets_of_sums())

    def arrived(self, parameter: torch.Tensor) -> list[Bucket]:
        if not self._agreed:
            self._agree([int(not all(map(will_reach, bucket))) for bucket in self._guessed()])
        startable = super().arrived(parameter)
        bucket_idx = self._number_of.get(parameter)
        if self._agreed == 1 and bucket_idx is not None and not self._missing[bucket_idx]:
            self._filled.append(bucket_idx)
        return startable

    def rest(self) -> list[Bucket]:
        if not self._agreed:
            self._agree([1] * len(self._guessed()))
        remaining = super().rest()
        if self._agreed == 1:
            turn = {idx: position for position, idx in enumerate(self._filled)}
            self._agree([turn.get(idx, len(self._buckets)) for idx in range(len(self._buckets))])
            super().rest()
        return remaining

    def reset(self) -> None:
        super().reset()
        self._filled.clear()

    def _guessed(self) -> list[Bucket]:
        position = {parameter: idx for idx, parameter in enumerate(self._parameters)}
        self._guess = sorted(self._buckets_of_sums(), key=lambda bucket: -position[bucket[0]])
        self._guess.sort(key=lambda bucket: bucket[-1].dim() < 2)  # biases and norms of all layers come last
        self._arrange(self._guess)
        return self._guess

    def _agree(self, turns: list[int]) -> None:
        """Sort the buckets by the maximum of their sort keys over the replicas. Collective.

        Args:
            turns: this replica's sort key for each bucket, in the current order of the buckets.
        """
        self._agreed += 1
        if not turns:
            return
        latest = torch.tensor(turns, dtype=torch.int32, device=self._parameters[0].device)
        dist.all_reduce(latest, dist.ReduceOp.MAX, group=self._group)
        agreed = latest.tolist()
        self._arrange(sorted(self._guess, key=lambda bucket: agreed[self._number_of[bucket[0]]]))

    def _buckets_of_sums(self) -> Iterator[Bucket]:
        """Yield the buckets for gradients of 32 or 64 bits; on a CPU, these are the buckets of ``reduce_gradients``."""
        parameters = self._parameters
        num_elements = self._numbers(parameters[0].device) if parameters else None
        if num_elements is not None:
            return buckets(parameters, torch.Tensor.numel, lambda p: accurate_dtype(p.dtype), num_elements)
        return buckets(
            parameters, lambda p: p.numel() * accurate_dtype(p.dtype).itemsize, lambda p: accurate_dtype(p.dtype)
        )


class BucketReducer:
    """All-reduces the gradients of a step over the replicas, partly during ``last_backward``; ``finish`` waits for all.

    Args:
        order: the order of the buckets.
        gradient_of: returns the accumulated gradient of a parameter, zeros if there is none.
        group: process group of the replicas.
        dtype: dtype in which gradients are sent and summed; None: the gradients' dtype.
        starts_early: start all-reduces during the last backward. Otherwise all start after it, with equal results.
        way_out: advice at the end of the error for a gradient that arrives after its all-reduce has started.
        scatter: starts the reduce-scatter of a bucket; None: all-reduce the gradients.
    """

    def __init__(
        self,
        order: BucketSchedule,
        gradient_of: Callable[[Any], torch.Tensor],
        group: Any,
        *,
        dtype: torch.dtype | None = None,
        starts_early: bool = True,
        way_out: str = "Recompute with use_reentrant=False",
        scatter: Callable[[Bucket], Any] | None = None,
    ) -> None:
        self.order = order
        self.dtype = dtype
        self.starts_early = starts_early
        self._gradient_of = gradient_of
        self._group = group
        self._way_out = way_out
        self._scatter = scatter
        self._hooks: list[Any] = []
        self._ready: set[torch.Tensor] = set()
        self._started: list[Any] = []  # ``GradientBucket`` or the result of ``scatter``

    @property
    def is_scattered(self) -> bool:
        """True if each replica gets only its shards of the reduced gradients."""
        return self._scatter is not None

    @contextmanager
    def last_backward(self, chunk: int = 0) -> Iterator[None]:
        """Start the all-reduce of each bucket as soon as the backward in the block fills it.

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
        parameters = self.order.of_chunk(chunk) if self.starts_early else ()
        self._hooks += [p.register_post_accumulate_grad_hook(self._arrive) for p in parameters if p.requires_grad]

    def end_last_backward(self) -> None:
        """Remove the hooks of ``begin_last_backward``."""
        while self._hooks:
            self._hooks.pop().remove()

    def _arrive(self, parameter: torch.Tensor) -> None:
        if parameter in self._ready and self.order.is_taken(parameter):
            raise RuntimeError(
                f"the gradient of a weight of shape {tuple(parameter.shape)} was accumulated twice in one backward, "
                f"the second time after its all-reduce over the replicas had started. {self._way_out}"
            )
        self.ready(parameter)

    def ready(self, parameter: torch.Tensor) -> None:
        """Register that the gradient of ``parameter`` is final, and start the buckets that are complete."""
        if self.starts_early and parameter not in self._ready:
            self._ready.add(parameter)
            self._start(self.order.arrived(parameter))

    def register_chunk_ready(self, chunk: int, apart_from: Iterable[torch.Tensor] = ()) -> None:
        """Register that the gradients of the parameters of ``chunk``, except ``apart_from``, are final."""
        still_waiting = set(apart_from)
        for parameter in self.order.of_chunk(chunk):
            if parameter not in still_waiting:
                self.ready(parameter)

    def finish_launch(self) -> None:
        """Start the remaining buckets, except the late ones. Collective.

        Must be called before other collectives of the group, so that all replicas run them in the same order.
        """
        self._start(self.order.rest())

    def finish(self, scale: float | torch.Tensor) -> None:
        """Start all remaining buckets, wait for all results and multiply them by ``scale``. Collective."""
        self.finish_launch()
        self._start(self.order.late)
        self.wait(scale)

    def wait(self, scale: float | torch.Tensor) -> None:
        """Wait for the running all-reduces, multiply their results by ``scale``, and reset."""
        for bucket in self._started:
            bucket.wait(scale)
        self._started.clear()
        self.reset()

    def reset(self) -> None:
        """Start a new batch; wait for all-reduces of an interrupted backward and discard its state."""
        self.end_last_backward()
        for bucket in self._started:
            bucket.work.wait()
        self._started.clear()
        self._ready.clear()
        self.order.reset()

    @torch.no_grad()
    def _start(self, ready: Iterable[Bucket]) -> None:
        for bucket in ready:
            if self._scatter is not None:
                self._started.append(self._scatter(bucket))
                continue
            gradients = [self._gradient_of(p) for p in bucket]
            self._started.append(GradientBucket.start_all_reduce(gradients, self._group, self.dtype))

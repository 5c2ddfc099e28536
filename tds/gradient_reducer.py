"""GradientReducer: sums over the replicas that start while the last backward runs; ChunkOrder and AgreedOrder say which
bucket is next.
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

# The last backward of a step makes gradients final one by one, from the last layer to the first. They travel in
# buckets, each of which starts as soon as its last gradient is there and those before it have started: replicas must
# start them in one order, whatever their graphs did. So the sums of all layers but the first run beside the backward
# itself. The sums are those of ``reduce_gradients`` behind the backward to the bit; only their time differs.
#
# What autograd adds to twice in one backward (a weight that several layers share, under reentrant recompute) could be
# sent half made. That is refused where the first half is on its way already.

Bucket = list[torch.nn.Parameter]


class BucketSchedule:
    """Says which buckets are to be summed now, backward after backward, on every replica in the same order.

    Each is given out once, by ``arrived`` or by ``rest``, until ``reset`` begins anew.
    """

    late: Sequence[Bucket] = ()
    """Buckets that come behind all others, when everything has been added to them."""

    def __init__(self) -> None:
        self._arrange([])

    def of_chunk(self, chunk: int) -> Sequence[torch.nn.Parameter]:
        """Return the parameters of one chunk of layers, whose gradients its last backward makes final."""
        raise NotImplementedError

    def every(self) -> list[Bucket]:
        """Return all buckets, the late ones too."""
        return [*self._buckets, *self.late]

    def is_taken(self, parameter: torch.Tensor) -> bool:
        """Return whether the bucket of ``parameter`` has been given out."""
        return parameter in self._number_of and self._number_of[parameter] < self._next

    def arrived(self, parameter: torch.Tensor) -> list[Bucket]:
        """Take note that the gradient of ``parameter`` is final; return what is full now. Once for each."""
        number = self._number_of.get(parameter)
        if number is None:  # empty, or in a late bucket
            return []
        self._missing[number] -= 1
        full = self._next
        while full < len(self._buckets) and not self._missing[full]:
            full += 1
        return self._take_up_to(full)

    def rest(self) -> list[Bucket]:
        """Return the buckets that are left, with a parameter that got no gradient here."""
        return self._take_up_to(len(self._buckets))

    def reset(self) -> None:
        """Begin anew; forget what has arrived, of a backward that broke off too."""
        self._next, self._missing = 0, [len(bucket) for bucket in self._buckets]

    def _take_up_to(self, end: int) -> list[Bucket]:
        first, self._next = self._next, max(self._next, end)
        return self._buckets[first:end]

    def _arrange(self, order: list[Bucket]) -> None:
        self._buckets = order
        self._number_of: dict[torch.Tensor, int] = {p: n for n, bucket in enumerate(order) for p in bucket}
        self._next, self._missing = 0, [len(bucket) for bucket in order]


class ChunkOrder(BucketSchedule):
    """The order of a pipeline stage: its last chunk first, each chunk from its last layer to its first.

    So the sums of chunks that finish early run beside the work of the others. Late are the parameters that are not of
    one chunk alone: tied weights, whose copies on several stages are added up first, what several chunks share, and
    what lies in no layer.

    Args:
        every: all parameters of the stage.
        chunks: those of each chunk, in the order of its layers.
        tied: those that other stages hold, too.
        bucket_bytes: None: ``BUCKET_BYTES``.
        numbers: of a bucket, in place of its bytes; None: the bytes count.
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
        """Begin a new batch; a program may have frozen or unfrozen parameters since the last one."""
        trained = {id(p) for p in self._every if p.requires_grad}
        if trained == self._trained:
            super().reset()
            return
        self._trained, late = trained, self._not_of_one
        self.late = list(self._buckets_of([p for p in self._every if p in late and p.requires_grad]))
        self._of_chunk = [[p for p in chunk if p.requires_grad and p not in late] for chunk in self._chunks]
        self._arrange([bucket for own in reversed(self._of_chunk) for bucket in self._buckets_of(own)])

    def _buckets_of(self, parameters: Bucket) -> Iterator[Bucket]:
        if self._numbers is None:
            return buckets(parameters, limit=self._bucket_bytes)
        return buckets(parameters, torch.Tensor.numel, limit=self._numbers)


class AgreedOrder(BucketSchedule):
    """The order in which the first backward has filled the buckets, agreed over the replicas.

    Buckets are those in which ``reduce_gradients`` sums gradients of 32 bits, or 64. In the first backward their order
    is a guess, the last weights first and what has biases or norms of all layers last. A bucket that backward does not
    fill, for a weight of it gets no gradient, would hold up all behind it: such buckets come last. Replicas agree on
    that in the first backward: at its first gradient by what autograd's graph says, and at its end by what has come.
    So ``arrived`` and ``rest`` are collective in the first backward.

    Args:
        numbers: tells of a device how many numbers a bucket has there; None: ``BUCKET_BYTES`` count.
    """

    def __init__(
        self, group: dist.ProcessGroup, numbers: Callable[[torch.device], int | None] = lambda place: None
    ) -> None:
        super().__init__()
        self._numbers = numbers
        self._parameters: list[torch.nn.Parameter] = []
        self._group = group
        self._guess: list[Bucket] = []
        self._filled: list[int] = []  # in their order, in the first backward
        self._agreed = 0  # how often replicas have agreed on the order: twice, and never again

    def register(self, parameter: torch.nn.Parameter) -> None:
        """Count ``parameter`` among those that are summed; all of them ahead of the first backward."""
        self._parameters.append(parameter)

    def of_chunk(self, chunk: int) -> Sequence[torch.nn.Parameter]:
        return self._parameters

    def every(self) -> list[Bucket]:
        return super().every() or list(self._buckets_of_sums())

    def arrived(self, parameter: torch.Tensor) -> list[Bucket]:
        if not self._agreed:
            self._agree([int(not all(map(will_reach, bucket))) for bucket in self._guessed()])
        full = super().arrived(parameter)
        number = self._number_of.get(parameter)
        if self._agreed == 1 and number is not None and not self._missing[number]:
            self._filled.append(number)
        return full

    def rest(self) -> list[Bucket]:
        if not self._agreed:
            self._agree([1] * len(self._guessed()))
        left = super().rest()
        if self._agreed == 1:
            turn = {number: place for place, number in enumerate(self._filled)}
            self._agree([turn.get(number, len(self._buckets)) for number in range(len(self._buckets))])
            super().rest()
        return left

    def reset(self) -> None:
        super().reset()
        self._filled.clear()

    def _guessed(self) -> list[Bucket]:
        place = {parameter: number for number, parameter in enumerate(self._parameters)}
        self._guess = sorted(self._buckets_of_sums(), key=lambda bucket: -place[bucket[0]])
        self._guess.sort(key=lambda bucket: bucket[-1].dim() < 2)  # biases and norms of all layers come last
        self._arrange(self._guess)
        return self._guess

    def _agree(self, turns: list[int]) -> None:
        """Let the buckets come by their turns, each as late as on the latest replica. Collective.

        Args:
            turns: of each bucket, in the order of now.
        """
        self._agreed += 1
        if not turns:
            return
        latest = torch.tensor(turns, dtype=torch.int32, device=self._parameters[0].device)
        dist.all_reduce(latest, dist.ReduceOp.MAX, group=self._group)
        agreed = latest.tolist()
        self._arrange(sorted(self._guess, key=lambda bucket: agreed[self._number_of[bucket[0]]]))

    def _buckets_of_sums(self) -> Iterator[Bucket]:
        """Yield the buckets in which gradients of 32 or 64 bits are summed; on a host as ``reduce_gradients`` does."""
        parameters = self._parameters
        numbers = self._numbers(parameters[0].device) if parameters else None
        if numbers is not None:
            return buckets(parameters, torch.Tensor.numel, lambda p: accurate_dtype(p.dtype), numbers)
        return buckets(
            parameters, lambda p: p.numel() * accurate_dtype(p.dtype).itemsize, lambda p: accurate_dtype(p.dtype)
        )


class GradientReducer:
    """The sums over the replicas of one step, some of which start within its ``last_backward``; ``finish`` awaits them.

    Args:
        order: of the buckets.
        gradient_of: returns where the accumulated gradient of a parameter lies, zeros where there is none.
        group: the replicas' process group.
        dtype: in which sums travel and are taken; None: the gradients' own.
        starts_early: False: all sums start after the last backward, to the same numbers.
        way_out: what helps where a gradient comes behind its sum; the end of the error.
        scatter: starts the sum of a bucket of which each replica gets its parts alone; None: an all-reduce of what
            ``gradient_of`` returns.
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
        self._started: list[Any] = []  # ``GradientBucket`` or what ``scatter`` returns

    @property
    def is_scattered(self) -> bool:
        """Whether each replica gets its parts of the sums alone."""
        return self._scatter is not None

    @contextmanager
    def last_backward(self, chunk: int = 0) -> Iterator[None]:
        """Start sums as the whole backward within, the last of ``chunk``, makes gradients final.

        Raises:
            RuntimeError: a gradient was added to once its sum had started.
        """
        self.begin_last_backward(chunk)
        try:
            yield
        finally:
            self.end_last_backward()

    def begin_last_backward(self, chunk: int = 0) -> None:
        """``last_backward`` for who cannot surround it; ``end_last_backward`` behind it."""
        chosen = self.order.of_chunk(chunk) if self.starts_early else ()
        self._hooks += [p.register_post_accumulate_grad_hook(self._arrive) for p in chosen if p.requires_grad]

    def end_last_backward(self) -> None:
        """Take away the hooks of ``begin_last_backward``."""
        while self._hooks:
            self._hooks.pop().remove()

    def _arrive(self, parameter: torch.Tensor) -> None:
        if parameter in self._ready and self.order.is_taken(parameter):
            raise RuntimeError(
                "backward must leave the gradient of a weight once, got one of shape "
                f"{tuple(parameter.shape)} twice, the second time when its sum over the replicas had started. "
                f"{self._way_out}"
            )
        self.ready(parameter)

    def ready(self, parameter: torch.Tensor) -> None:
        """Take note that the gradient of ``parameter`` is final."""
        if self.starts_early and parameter not in self._ready:
            self._ready.add(parameter)
            self._start(self.order.arrived(parameter))

    def register_chunk_ready(self, chunk: int, apart_from: Iterable[torch.Tensor] = ()) -> None:
        """Take note that the gradients of ``chunk`` are final, ``apart_from`` some."""
        still_waiting = set(apart_from)
        for parameter in self.order.of_chunk(chunk):
            if parameter not in still_waiting:
                self.ready(parameter)

    def finish_launch(self) -> None:
        """Start what has not started. Ahead of other collectives of the group, so that all replicas run them in one
        order. Collective."""
        self._start(self.order.rest())

    def finish(self, scale: float | torch.Tensor) -> None:
        """Start what is left, the late buckets too; wait for all sums and multiply them by ``scale``. Collective."""
        self.finish_launch()
        self._start(self.order.late)
        self.wait(scale)

    def wait(self, scale: float | torch.Tensor) -> None:
        """Wait for the sums that have started, multiply them by ``scale``, and begin anew."""
        for bucket in self._started:
            bucket.wait(scale)
        self._started.clear()
        self.reset()

    def reset(self) -> None:
        """Begin a new batch: forget a backward that broke off, once the sums that it has started are here."""
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

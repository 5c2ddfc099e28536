"""Adding up gradients over the replicas while the pipeline still drains.

The last backward of a chunk makes its gradients final one by one, from the last layer to the first. They travel in
buckets, each of which starts as soon as its last gradient is there and those before it have started: replicas must
start them in one order, whatever their graphs did. So the sums of all layers but the first run beside the backward
itself, and those of stages and chunks that finish early beside the work of the others.

Tied weights go last: their copies on several stages are added up first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tds.gradients import BUCKET_BYTES, Flight, buckets, fly
from tds.optimizers import Gradients


class Reduction:
    """The sums of one engine.

    Args:
        chunks: the parameters of each chunk, in the order of its layers.
        tied: parameters that other stages hold, too.
        gradients: where gradients lie.
        group: the replicas' process group.
        dtype: in which sums travel and are taken; None: the gradients' own.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[torch.nn.Parameter]],
        tied: Iterable[torch.nn.Parameter],
        gradients: Gradients,
        group: Any,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.gradients = gradients
        self.group = group
        self.dtype = dtype
        held = {p for p in tied if p.requires_grad}
        self._tied = [p for p in dict.fromkeys(p for chunk in chunks for p in chunk) if p in held]
        self._of_chunk: list[list[torch.nn.Parameter]] = []
        self._buckets: list[list[torch.nn.Parameter]] = []
        seen = set(held)
        for parameters in reversed(chunks):
            own = [p for p in reversed(parameters) if p.requires_grad and p not in seen]
            seen.update(own)
            self._of_chunk.insert(0, own)
            self._buckets += buckets(own, bucket_bytes)
        self._bucket_of = {p: index for index, bucket in enumerate(self._buckets) for p in bucket}
        self.reset()

    def reset(self) -> None:
        """Begin a new batch."""
        self._waiting = [len(bucket) for bucket in self._buckets]
        self._ready: set[torch.Tensor] = set()
        self._flights: list[Flight] = []

    @contextmanager
    def last_backward(self, chunk: int) -> Iterator[None]:
        """Start sums as the whole backward within, the last of ``chunk``, makes gradients final.

        Only where a parameter's hook runs once in a backward: not under reentrant recompute.
        """
        handles = [p.register_post_accumulate_grad_hook(self.ready) for p in self._of_chunk[chunk]]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def ready(self, parameter: torch.Tensor) -> None:
        """Take note that the gradient of ``parameter`` is final."""
        index = self._bucket_of.get(parameter)  # type: ignore[call-overload]
        if index is None or parameter in self._ready:
            return
        self._ready.add(parameter)
        self._waiting[index] -= 1
        while len(self._flights) < len(self._buckets) and self._waiting[len(self._flights)] <= 0:
            self._start(self._buckets[len(self._flights)])

    def chunk_ready(self, chunk: int, apart_from: Iterable[torch.Tensor] = ()) -> None:
        """Take note that the gradients of ``chunk`` are final, ``apart_from`` some."""
        still_waiting = set(apart_from)
        for parameter in self._of_chunk[chunk]:
            if parameter not in still_waiting:
                self.ready(parameter)

    def start_rest(self) -> None:
        """Start what has not started: buckets with a parameter that got no gradient here. Ahead of other collectives
        of the group, so that all replicas run them in one order."""
        for bucket in self._buckets[len(self._flights) :]:
            self._start(bucket)

    def finish(self, scale: float) -> None:
        """Wait for all sums, tied weights' included, and multiply them by ``scale``. Collective."""
        self.start_rest()
        for bucket in buckets(self._tied, BUCKET_BYTES):
            self._start(bucket)
        for flight in self._flights:
            flight.land(scale)
        self.reset()

    def _start(self, bucket: list[torch.nn.Parameter]) -> None:
        with torch.no_grad():
            self._flights.append(fly([self.gradients.of(p) for p in bucket], self.group, self.dtype))


def reduces_by_hand(group: Any) -> bool:
    """True if there are replicas to add up over."""
    return group is not None and dist.get_world_size(group) > 1

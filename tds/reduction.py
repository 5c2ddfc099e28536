"""Adding up gradients over the replicas while the pipeline still drains.

The last backward of a chunk makes its gradients final one by one, from the last layer to the first. They travel in
buckets, each of which starts as soon as its last gradient is there and those before it have started: replicas must
start them in one order, whatever their graphs did. So the sums of all layers but the first run beside the backward
itself, and those of stages and chunks that finish early beside the work of the others.

Last go the parameters that are not of one chunk alone: tied weights, whose copies on several stages are added up first,
what several chunks share, and what lies in no layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tds.gradients import BUCKET_BYTES, Flight, GradientSource, buckets, fly


class Reduction:
    """The sums of one engine.

    Args:
        every: all parameters of the stage.
        chunks: those of each chunk, in the order of its layers.
        tied: those that other stages hold, too.
        gradients: where gradients lie.
        group: the replicas' process group.
        dtype: in which sums travel and are taken; None: the gradients' own.
        starts_early: False: all sums start after the last backward, to the same numbers.
    """

    def __init__(
        self,
        every: Iterable[torch.nn.Parameter],
        chunks: Sequence[Sequence[torch.nn.Parameter]],
        tied: Iterable[torch.nn.Parameter],
        gradients: GradientSource,
        group: Any,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        starts_early: bool = True,
    ) -> None:
        self.gradients = gradients
        self.starts_early = starts_early
        self.group = group
        self.dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._every = list(dict.fromkeys(every))
        self._chunks = [list(dict.fromkeys(reversed(chunk))) for chunk in chunks]
        holders = Counter(p for chunk in self._chunks for p in chunk)
        self._not_of_one = {p for p in self._every if holders[p] != 1} | set(tied)
        self._trained: set[int] | None = None
        self.reset()

    def reset(self) -> None:
        """Begin a new batch; a program may have frozen or unfrozen parameters since the last one."""
        trained = {id(p) for p in self._every if p.requires_grad}
        if trained != self._trained:
            self._trained = trained
            self._make_buckets()
        self._waiting = [len(bucket) for bucket in self._buckets]
        self._ready: set[torch.Tensor] = set()
        self._flights: list[Flight] = []

    def _make_buckets(self) -> None:
        late = self._not_of_one
        self._late = [p for p in self._every if p in late and p.requires_grad]
        self._of_chunk = [[p for p in chunk if p.requires_grad and p not in late] for chunk in self._chunks]
        self._buckets = [bucket for own in reversed(self._of_chunk) for bucket in buckets(own, self._bucket_bytes)]
        self._bucket_of = {p: index for index, bucket in enumerate(self._buckets) for p in bucket}

    @contextmanager
    def last_backward(self, chunk: int) -> Iterator[None]:
        """Start sums as the whole backward within, the last of ``chunk``, makes gradients final.

        Only where a parameter's hook runs once in a backward: not under reentrant recompute.

        Raises:
            RuntimeError: a hook ran twice, so its sum may have started too early.
        """
        chosen = self._of_chunk[chunk] if self.starts_early else []
        handles = [p.register_post_accumulate_grad_hook(self._ready_once) for p in chosen]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _ready_once(self, parameter: torch.Tensor) -> None:
        if parameter in self._ready:
            raise RuntimeError(
                f"the gradient of a parameter of shape {list(parameter.shape)} was added to twice in one backward, the "
                "second time after its sum over the replicas had started. Reentrant checkpointing of layers that share "
                "a weight does that: call torch.utils.checkpoint with use_reentrant=False"
            )
        self.ready(parameter)

    def ready(self, parameter: torch.Tensor) -> None:
        """Take note that the gradient of ``parameter`` is final."""
        index = self._bucket_of.get(parameter)  # type: ignore[call-overload]
        if not self.starts_early or index is None or parameter in self._ready:
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
        """Wait for all sums, the late ones' included, and multiply them by ``scale``. Collective."""
        self.start_rest()
        for bucket in buckets(self._late, BUCKET_BYTES):
            self._start(bucket)
        for flight in self._flights:
            flight.land(scale)
        self.reset()

    def _start(self, bucket: list[torch.nn.Parameter]) -> None:
        with torch.no_grad():
            self._flights.append(fly([self.gradients.of(p) for p in bucket], self.group, self.dtype))

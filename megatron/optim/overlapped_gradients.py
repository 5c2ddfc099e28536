"""ZeRO 0 and 1: whole gradients that are summed over the replicas while the last backward of a step runs.

Up to the last micro-batch a gradient is added up where it lies, and nothing is sent. In the last backward each is final
as soon as it comes, and a bucket is on its way as soon as all of it has come (``megatron.optim.bucket_order``). What
the last micro-batch does not reach has the sum of the others, or zeros: its bucket goes last.

The sums are those of ``tds.reduce_gradients`` after the backward to the bit, in the same buckets; only their time
differs. What autograd adds to twice in one backward (a weight that several layers share, under reentrant recompute)
would be sent half made, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.optim.bucket_order import Bucket, BucketOrder
from megatron.optim.flight import Flight, fly
from megatron.optim.gradients import WholeGradients
from megatron.optim.masters import Masters


class OverlappedGradients(WholeGradients):
    """``WholeGradients`` that are summed over the replicas by themselves."""

    are_summed = True

    def __init__(self, masters: Masters) -> None:
        super().__init__(masters)
        self._group = masters.data_group.handle
        self._order = BucketOrder(self._group)
        self._is_last = False
        self._final: set[torch.Tensor] = set()
        self._flights: list[Flight] = []

    def adopt(self, parameter: torch.nn.Parameter) -> None:
        super().adopt(parameter)
        parameter.register_post_accumulate_grad_hook(self._arrive)  # behind the hook that adds up in fp32
        self._order.adopt(parameter)

    def begin_last_backward(self) -> None:
        self._is_last = True

    def end_micro_batch(self) -> None:
        """After the last one start the sums that have not started. Collective."""
        if not self._is_last:
            return
        self._is_last = False
        self._final.clear()
        self._start(self._order.rest())
        self._order.end()

    def finish(self, factor: float) -> None:
        flights, self._flights = self._flights, []
        for flight in flights:
            flight.land(factor)

    def clear(self) -> None:
        for flight in self._flights:
            flight.work.wait()
        self._flights.clear()
        self._final.clear()
        self._is_last = False
        self._order.reset()
        super().clear()

    def _arrive(self, parameter: torch.Tensor) -> None:
        """Take note of the gradient that backward has just left."""
        if not self._is_last or not parameter.numel():
            return
        if parameter not in self._final:
            self._final.add(parameter)
            self._start(self._order.arrived(parameter))
        elif self._order.is_taken(parameter):
            raise RuntimeError(
                "backward must leave the gradient of a weight once, got one of shape "
                f"{tuple(parameter.shape)} twice, the second time when its sum over the replicas had started. "
                "Recompute with use_reentrant=False, or add --no-overlap-grad-reduce"
            )

    def _start(self, buckets: Iterable[Bucket]) -> None:
        with torch.no_grad():
            self._flights += [fly([self.of(p) for p in bucket], self._group) for bucket in buckets]

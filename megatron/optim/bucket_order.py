"""In which order buckets of gradients are summed while backward fills them: one order for all replicas.

Buckets are those in which ``tds.reduce_gradients`` sums after backward: one sum rounds as its place in a bucket says.
Their order is a guess at when backward fills them, the last weights first. A bucket that backward does not fill, for a
weight of it gets no gradient, would hold up all behind it: such buckets come last, and are summed at the end. Replicas
agree on them in the first backward: at its first gradient by what autograd's graph says, and at its end by what has
come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.mpu.grads import accurate_dtype
from megatron.mpu.groups import Group
from megatron.optim import backward

BUCKET_BYTES = 32 * 2**20
"""Of the gradients that are summed together, in the type of the sum; a larger one is summed alone."""

Bucket = list[torch.nn.Parameter]


class BucketOrder:
    """Says which buckets are to be summed, backward after backward.

    ``arrived`` and ``rest`` return buckets that the caller then sums, on every replica the same in the same order.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._parameters: list[torch.nn.Parameter] = []
        self._guess: list[Bucket] = []
        self._buckets: list[Bucket] = []
        self._number_of: dict[torch.Tensor, int] = {}
        self._missing: list[int] = []
        self._came: list[bool] = []
        self._next = 0
        self._agreed = 0  # how often replicas have agreed on the order: twice, and never again

    def adopt(self, parameter: torch.nn.Parameter) -> None:
        """Count ``parameter`` among those that are summed; all of them ahead of the first backward."""
        self._parameters.append(parameter)

    def is_taken(self, parameter: torch.Tensor) -> bool:
        """Return whether the bucket of ``parameter`` has been given out in this backward."""
        return parameter in self._number_of and self._number_of[parameter] < self._next

    def arrived(self, parameter: torch.Tensor) -> list[Bucket]:
        """Take note that backward has left the gradient of ``parameter``, which has numbers; return what is full now.

        Collective in the first backward.
        """
        order = self._in_order()
        if not self._agreed:
            self._agree([not all(map(backward.will_reach, bucket)) for bucket in order])
        self._missing[self._number_of[parameter]] -= 1
        full = self._next
        while full < len(self._buckets) and not self._missing[full]:
            full += 1
        return self._take_up_to(full)

    def rest(self) -> list[Bucket]:
        """Return the buckets that are left when backward is through. Collective in the first backward."""
        if not self._agreed:
            self._agree([True] * len(self._in_order()))
        self._came = [number < self._next or not missing for number, missing in enumerate(self._missing)]
        return self._take_up_to(len(self._buckets))

    def end(self) -> None:
        """Make ready for the next backward, once what ``rest`` has returned is being summed. Collective in the first."""
        self._next = 0
        if self._agreed == 1:
            self._agree([not each for each in self._came])

    def reset(self) -> None:
        """Forget what has arrived, of a backward that broke off too."""
        self._next, self._missing = 0, [len(bucket) for bucket in self._buckets]

    def _take_up_to(self, end: int) -> list[Bucket]:
        first, self._next = self._next, end
        for number in range(first, end):
            self._missing[number] = len(self._buckets[number])
        return self._buckets[first:end]

    def _in_order(self) -> list[Bucket]:
        if not self._buckets:
            place = {parameter: number for number, parameter in enumerate(self._parameters)}
            self._guess = sorted(buckets(self._parameters), key=lambda bucket: -place[bucket[0]])
            self._guess.sort(key=lambda bucket: bucket[0].dim() < 2)  # biases and norms of all layers come last
            self._arrange(self._guess)
        return self._buckets

    def _agree(self, is_late: list[bool]) -> None:
        """Put the buckets last that are late on any replica. Collective.

        Args:
            is_late: of each bucket, in the order of now.
        """
        self._agreed += 1
        if not is_late:
            return
        late = torch.tensor(is_late, dtype=torch.int32, device=self._parameters[0].device)
        dist.all_reduce(late, dist.ReduceOp.MAX, group=self._group.handle)
        told = late.tolist()
        self._arrange(sorted(self._guess, key=lambda bucket: told[self._number_of[bucket[0]]]))

    def _arrange(self, order: list[Bucket]) -> None:
        self._buckets = order
        self._missing = [len(bucket) for bucket in order]
        self._number_of = {p: number for number, bucket in enumerate(order) for p in bucket}


def buckets(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int | None = None) -> list[Bucket]:
    """Return runs of ``parameters`` whose sums have at most so many bytes together, or one parameter.

    They are those of ``tds.gradients.buckets`` for the gradients that are summed after backward.
    """
    limit = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    found: list[Bucket] = []
    size = 0
    for parameter in parameters:
        if not parameter.numel():
            continue
        num_bytes = parameter.numel() * accurate_dtype(parameter.dtype).itemsize
        if not found or size + num_bytes > limit:
            found.append([])
            size = 0
        found[-1].append(parameter)
        size += num_bytes
    return found

"""In which order buckets of gradients are summed while backward fills them: one order for all replicas.

Buckets are those in which ``tds.reduce_gradients`` sums after backward: one sum rounds as its place in a bucket says.
In the first backward their order is a guess, the last weights first and what has biases or norms of all layers last;
from then on it is the order in which the first one has filled them. A bucket that backward does not fill, for a weight
of it gets no gradient, would hold up all behind it: such buckets come last, and are summed at the end. Replicas agree
on that in the first backward: at its first gradient by what autograd's graph says, and at its end by what has come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.mpu.grads import accurate_dtype
from megatron.optim import backward

BUCKET_BYTES = 32 * 2**20
"""Of the gradients that are summed together, in the type of the sum; a larger one is summed alone."""

Bucket = list[torch.nn.Parameter]


class BucketOrder:
    """Says which buckets are to be summed, backward after backward.

    ``arrived`` and ``rest`` return buckets that the caller then sums, on every replica the same in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._parameters: list[torch.nn.Parameter] = []
        self._guess: list[Bucket] = []
        self._buckets: list[Bucket] = []
        self._number_of: dict[torch.Tensor, int] = {}
        self._missing: list[int] = []
        self._filled: list[int] = []  # in their order, in the first backward
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
            self._agree([int(not all(map(backward.will_reach, bucket))) for bucket in order])
        number, full = self._number_of[parameter], self._next
        self._missing[number] -= 1
        if self._agreed == 1 and not self._missing[number]:
            self._filled.append(number)
        while full < len(self._buckets) and not self._missing[full]:
            full += 1
        return self._take_up_to(full)

    def rest(self) -> list[Bucket]:
        """Return the buckets that are left when backward is through. Collective in the first backward."""
        if not self._agreed:
            self._agree([1] * len(self._in_order()))
        return self._take_up_to(len(self._buckets))

    def end(self) -> None:
        """Make ready for the next backward, behind the sums of what ``rest`` has returned. Collective in the first."""
        self._next = 0
        if self._agreed == 1:
            turn = {number: place for place, number in enumerate(self._filled)}
            self._agree([turn.get(number, len(self._buckets)) for number in range(len(self._buckets))])

    def reset(self) -> None:
        """Forget what has arrived, of a backward that broke off too."""
        self._next, self._missing = 0, [len(bucket) for bucket in self._buckets]
        self._filled.clear()

    def _take_up_to(self, end: int) -> list[Bucket]:
        first, self._next = self._next, end
        for number in range(first, end):
            self._missing[number] = len(self._buckets[number])
        return self._buckets[first:end]

    def _in_order(self) -> list[Bucket]:
        if not self._buckets:
            place = {parameter: number for number, parameter in enumerate(self._parameters)}
            self._guess = sorted(buckets(self._parameters), key=lambda bucket: -place[bucket[0]])
            self._guess.sort(key=lambda bucket: bucket[-1].dim() < 2)  # biases and norms of all layers come last
            self._arrange(self._guess)
        return self._buckets

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
        told = latest.tolist()
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

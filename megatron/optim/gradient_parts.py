"""ZeRO 2: gradients are summed over the replicas within backward, and each replica keeps its parts of them alone.

A bucket of weights is summed as soon as backward has left the gradient of each, while it goes on; the sum of one bucket
is on its way at a time. What a replica keeps is the sum over micro-batches of its parts, in fp32. So a step holds 4 / d
bytes of gradients for a parameter, a bucket or two more, and what backward has left in a bucket that is not full yet.

Every micro-batch is summed by itself, as DeepSpeed does: to wait for the last one would keep whole gradients, which is
what this stage is there to avoid. With one micro-batch a step the sums are those of ZeRO 0 to the bit where the
replicas' sums are (``megatron.optim.owners``); with several the additions come in another order.

Buckets are those in which ZeRO 0 sums: one sum rounds as its place in a bucket says. All replicas sum them in one
order, the last weights first. A bucket that backward does not fill, for a weight of it gets no gradient, would hold up
all behind it: such buckets come last, and are summed at the end, with zeros for what is missing. Replicas agree on them
in the first micro-batch: at its first gradient by what autograd's graph says, and at its end by what has come.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.mpu.grads import accurate_dtype
from megatron.mpu.shard import Shard, shard_of
from megatron.optim import backward
from megatron.optim.masters import Masters
from megatron.optim.owners import Share, Sum

BUCKET_BYTES = 32 * 2**20
"""Of the gradients that are summed together, in the type of the sum; a larger one is summed alone."""


class GradientParts:
    """The parts that this replica keeps of the gradients of all parameters."""

    are_summed = True

    def __init__(self, masters: Masters) -> None:
        self._masters = masters
        self.holders = masters.data_group
        self._parts: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._arrived: dict[torch.Tensor, torch.Tensor | None] = {}
        self._parameters: list[torch.nn.Parameter] = []
        self._guess: list[list[torch.nn.Parameter]] = []
        self._buckets: list[list[torch.nn.Parameter]] = []
        self._number_of: dict[torch.Tensor, int] = {}
        self._missing: list[int] = []
        self._next = 0
        self._agreed = 0  # how often replicas have agreed on the order: twice, and never again
        self._flight: Sum | None = None

    def adopt(self, parameter: torch.nn.Parameter) -> None:
        parameter.register_post_accumulate_grad_hook(self._take)
        self._parameters.append(parameter)

    def of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter not in self._parts:
            dtype = accurate_dtype(parameter.dtype)
            self._parts[parameter] = torch.zeros_like(self._view(parameter), dtype=dtype).contiguous()
        return self._parts[parameter]

    def shard(self, parameter: torch.nn.Parameter) -> Shard:
        return shard_of(self._masters.of[parameter])

    def part(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return self.of(parameter)

    def counts_here(self, parameter: torch.nn.Parameter) -> bool:
        return self._masters.is_cut(parameter) or self.holders.rank == 0

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        """Sum what is left, and have all sums here. Collective over the replicas."""
        if not self._agreed:
            self._agree([True] * len(self._in_order()))
        came = [number < self._next or not missing for number, missing in enumerate(self._missing)]
        while self._next < len(self._in_order()):
            self._start_sum()
        self._land()
        self._next = 0
        if self._agreed == 1:
            self._agree([not each for each in came])

    def clear(self) -> None:
        """Forget all gradients, those of a backward that broke off too."""
        self._land()
        self._parts.clear()
        self._arrived.clear()
        self._next, self._missing = 0, [len(bucket) for bucket in self._buckets]

    @torch.no_grad()
    def _take(self, parameter: torch.Tensor) -> None:
        """Take the gradient that backward has just left in ``parameter``."""
        order = self._in_order()
        if not parameter.numel():  # it is in no bucket
            return
        if not self._agreed:
            self._agree([not all(map(backward.will_reach, bucket)) for bucket in order])
            order = self._in_order()
        number = self._number_of[parameter]
        if parameter in self._arrived or number < self._next:
            raise RuntimeError(
                "backward must leave the gradient of a weight once for each micro-batch, got one of shape "
                f"{tuple(parameter.shape)} twice: under --zero-stage 2 and 3 its sum over the replicas may be on its "
                "way. Recompute with use_reentrant=False, or use --zero-stage 1"
            )
        self._arrived[parameter], parameter.grad = parameter.grad, None
        self._missing[number] -= 1
        while self._next < len(order) and not self._missing[self._next]:
            self._start_sum()

    def _start_sum(self) -> None:
        """Let the next bucket be summed; the one before it is here then."""
        bucket = self._in_order()[self._next]
        self._missing[self._next] = len(bucket)
        self._next += 1
        self._land()
        shares = [Share(self._arrived.pop(p, None), p, self._masters.cut(p)) for p in bucket]
        self._flight = Sum(shares, self.holders)

    def _land(self) -> None:
        """Wait for the sum that is on its way, and keep this replica's parts of it."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        for parameter, part in flight.parts():
            if parameter in self._parts:
                self._parts[parameter].add_(part)
            else:
                self._parts[parameter] = part

    def _in_order(self) -> list[list[torch.nn.Parameter]]:
        """Return the buckets in the order of their sums: a guess at when backward fills them, the same on all ranks."""
        if not self._buckets:
            place = {parameter: number for number, parameter in enumerate(self._parameters)}
            self._guess = sorted(buckets(self._parameters), key=lambda bucket: -place[bucket[0]])
            self._guess.sort(key=lambda bucket: bucket[0].dim() < 2)  # biases and norms of all layers come last
            self._arrange(self._guess)
        return self._buckets

    def _agree(self, is_late: list[bool]) -> None:
        """Put the buckets last that are late on any replica. Collective, while no bucket is on its way to its sum.

        Args:
            is_late: of each bucket, in the order of now.
        """
        self._agreed += 1
        if not is_late:
            return
        late = torch.tensor(is_late, dtype=torch.int32, device=self._parameters[0].device)
        dist.all_reduce(late, dist.ReduceOp.MAX, group=self.holders.handle)
        told = late.tolist()
        self._arrange(sorted(self._guess, key=lambda bucket: told[self._number_of[bucket[0]]]))

    def _arrange(self, order: list[list[torch.nn.Parameter]]) -> None:
        self._buckets = order
        self._missing = [len(bucket) for bucket in order]
        self._number_of = {p: number for number, bucket in enumerate(order) for p in bucket}

    def _view(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        cut = self._masters.cut(parameter)
        return parameter if cut is None else cut.part(parameter.detach(), self.holders.rank)


def buckets(
    parameters: Sequence[torch.nn.Parameter], bucket_bytes: int | None = None
) -> list[list[torch.nn.Parameter]]:
    """Return runs of ``parameters`` whose sums have at most so many bytes together, or one parameter.

    They are those of ``tds.gradients.buckets`` for the gradients that ZeRO 0 sums.
    """
    limit = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    found: list[list[torch.nn.Parameter]] = []
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

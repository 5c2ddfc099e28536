"""ZeRO 2: gradients are summed over the replicas within backward, and each replica keeps its parts of them alone.

A bucket of weights is summed as soon as backward has left the gradient of each, while it goes on; the sum of one bucket
is on its way at a time. What a replica keeps is the sum over micro-batches of its parts, in fp32. So a step holds 4 / d
bytes of gradients for a parameter, a bucket or two more, and what backward has left in a bucket that is not full yet.

Every micro-batch is summed by itself, as DeepSpeed does: to wait for the last one would keep whole gradients, which is
what this stage is there to avoid. With one micro-batch a step the sums are those of ZeRO 0 to the bit where the
replicas' sums are (``megatron.optim.owners``); with several the additions come in another order.

Buckets are those in which ZeRO 0 sums, and all replicas sum them in one order (``megatron.optim.bucket_order``); what
backward does not reach is summed at its end, with zeros for what is missing.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.2.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.mpu.grads import accurate_dtype
from megatron.mpu.shard import Shard, shard_of
from megatron.optim.bucket_order import Bucket, BucketOrder
from megatron.optim.gradients import multiply
from megatron.optim.masters import Masters
from megatron.optim.owners import Share, Sum


class GradientParts:
    """The parts that this replica keeps of the gradients of all parameters."""

    are_summed = True

    def __init__(self, masters: Masters) -> None:
        self._masters = masters
        self.holders = masters.data_group
        self._parts: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._arrived: dict[torch.Tensor, torch.Tensor | None] = {}
        self._order = BucketOrder(self.holders.handle)
        self._flight: Sum | None = None

    def adopt(self, parameter: torch.nn.Parameter) -> None:
        parameter.register_post_accumulate_grad_hook(self._take)
        self._order.adopt(parameter)

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

    def begin_last_backward(self) -> None:
        """Every backward is summed, the last one as the others."""

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        """Sum what is left, and have all sums here. Collective over the replicas."""
        self._sum(self._order.rest())
        self._land()
        self._order.end()

    def finish(self, factor: float) -> None:
        multiply(self._parts.values(), factor)

    def clear(self) -> None:
        """Forget all gradients, those of a backward that broke off too."""
        self._land()
        self._parts.clear()
        self._arrived.clear()
        self._order.reset()

    @torch.no_grad()
    def _take(self, parameter: torch.Tensor) -> None:
        """Take the gradient that backward has just left in ``parameter``."""
        if not parameter.numel():  # it is in no bucket
            return
        if parameter in self._arrived or self._order.is_taken(parameter):
            raise RuntimeError(
                "backward must leave the gradient of a weight once for each micro-batch, got one of shape "
                f"{tuple(parameter.shape)} twice: under --zero-stage 2 and 3 its sum over the replicas may be on its "
                "way. Recompute with use_reentrant=False, or use --zero-stage 1"
            )
        self._arrived[parameter], parameter.grad = parameter.grad, None
        self._sum(self._order.arrived(parameter))

    def _sum(self, buckets: Iterable[Bucket]) -> None:
        """Let ``buckets`` be summed; before each the one ahead of it is here."""
        for bucket in buckets:
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

    def _view(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        cut = self._masters.cut(parameter)
        return parameter if cut is None else cut.part(parameter.detach(), self.holders.rank)

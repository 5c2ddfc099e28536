"""The interface."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron.mpu.groups import Group
from megatron.mpu.shard import Shard


class Gradients(Protocol):
    """What a step needs of the gradients that its micro-batches leave.

    Attributes:
        are_summed: over the replicas, by themselves: the engine must not do it again.
    """

    are_summed: bool

    @property
    def holders(self) -> Group:
        """The replicas over which a sum over all gradients is taken; one alone where each has the whole of them."""

    def register(self, parameter: torch.nn.Parameter) -> None:
        """Take what backward leaves in ``parameter``, which has its dtype, from now on."""

    def of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the gradient that this rank holds, zeros if no micro-batch has reached ``parameter`` yet."""

    def shard(self, parameter: torch.nn.Parameter) -> Shard:
        """Return where that lies in the global tensor."""

    def part(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return what of it lies where the master does, in one run of memory."""

    def is_counted_in_norm(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether this replica counts it in sums over ``holders``."""

    def begin_last_backward(self) -> None:
        """Take note that the next backward is the last of the step."""

    def end_micro_batch(self) -> None:
        """Take note that backward is through. Collective where gradients are summed by themselves."""

    def finish(self, factor: float) -> None:
        """Have all gradients where they lie, times ``factor``."""

    def clear(self) -> None:
        """Forget all of them."""

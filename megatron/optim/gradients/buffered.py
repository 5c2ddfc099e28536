"""Buffered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import Shard, shard_of
from megatron.optim.gradients.buffer import GradBuffer, scatters
from megatron.optim.gradients.local import MainGradients
from megatron.optim.param_store import MainParams
from megatron.optim.zero.partition import ParamPartition
from tds.gradient_reducer import AgreedOrder, Bucket, BucketSchedule
from tds.gradients import is_reduced_apart


class BufferedGradients(MainGradients):
    """Gradients of several replicas with ZeRO 0 or 1, in a ``GradBuffer``: their sums are made where they lie.

    The engine makes them, in its own buckets (``follow``). With ZeRO 1 on NCCL they leave each replica its parts.
    """

    def __init__(self, masters: MainParams) -> None:
        super().__init__(masters)
        self._order = AgreedOrder(masters.data_group.handle, masters.bucket_numbers)
        self.buffer = GradBuffer(self._order, masters.data_group)

    def follow(self, order: BucketSchedule) -> Callable[[Bucket], Any] | None:
        """Let gradients lie in the buckets of ``order`` from now on.

        Returns:
            what starts the sum of a bucket of which each replica gets its parts; None where each gets the whole.
        """
        group = self._masters.data_group
        is_scattered = self._masters.are_shared_out and scatters(group)
        self.buffer = GradBuffer(order, group, self._cut if is_scattered else None)
        return self.buffer.start_reduce_scatter if is_scattered else None

    def _cut(self, parameter: torch.nn.Parameter) -> ParamPartition | None:
        """Return how the sum of a gradient is cut; that of an expert, which is made elsewhere, is whole."""
        return None if is_reduced_apart(parameter) else self._masters.cut(parameter)

    @property
    def holders(self) -> Group:  # type: ignore[override]
        return self._masters.data_group if self.buffer.is_scattered else SINGLE

    def register(self, parameter: torch.nn.Parameter) -> None:
        if not is_reduced_apart(parameter):
            self._order.register(parameter)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(self._add_to_sum)

    def of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        self.buffer.add(parameter)  # of a parameter without a hook, such as one unfrozen since
        return self.buffer.main_grad(parameter)

    def add_product(self, parameter: torch.nn.Parameter, rows: torch.Tensor, inputs: torch.Tensor) -> None:
        self.buffer.add_product(parameter, rows, inputs)

    def shard(self, parameter: torch.nn.Parameter) -> Shard:
        is_part = self.buffer.is_scattered and not is_reduced_apart(parameter)
        return shard_of(self._masters.of[parameter] if is_part else parameter)

    def part(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        is_part = self.buffer.is_scattered and not is_reduced_apart(parameter)
        return self.of(parameter) if is_part else super().part(parameter)

    def is_counted_in_norm(self, parameter: torch.nn.Parameter) -> bool:
        return not self.buffer.is_scattered or self._masters.is_cut(parameter) or self.holders.rank == 0

    def clear(self) -> None:
        self.buffer.clear()

    def _add_to_sum(self, parameter: torch.Tensor) -> None:
        self.buffer.add(parameter)  # type: ignore[arg-type]

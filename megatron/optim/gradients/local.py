"""Local."""

from __future__ import annotations

import torch

from megatron.mpu.groups import SINGLE
from megatron.mpu.shard import Shard, shard_of
from megatron.optim.param_store import MainParams
from tds.fused_linear import add_product
from tds.grad_norm import accurate_dtype
from tds.gradients import WIDE, multiply


class MainGradients:
    """Gradients of one replica, or those that each replica holds whole: ZeRO 0 and 1.

    Those of 16-bit parameters are added up in fp32 and freed at once, others are where autograd leaves them.
    """

    are_summed, holders = False, SINGLE

    def __init__(self, masters: MainParams) -> None:
        self._masters = masters
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}

    def register(self, parameter: torch.nn.Parameter) -> None:
        if parameter.dtype not in WIDE:
            parameter.register_post_accumulate_grad_hook(self._add_to_sum)

    def of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter.dtype not in WIDE:
            if parameter not in self._sums:
                self._sums[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
            return self._sums[parameter]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def add_product(self, parameter: torch.nn.Parameter, rows: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add ``rows^T inputs``, the gradient of ``parameter`` in a backward, by the product itself."""
        place = parameter.grad if parameter.dtype in WIDE else self._sums.get(parameter)
        is_first = place is None
        if place is None:
            place = torch.empty_like(parameter, dtype=accurate_dtype(parameter.dtype), requires_grad=False)
            if parameter.dtype in WIDE:
                parameter.grad = place
            else:
                self._sums[parameter] = place
        add_product(place, rows.t(), inputs, is_first=is_first)

    def shard(self, parameter: torch.nn.Parameter) -> Shard:
        return shard_of(parameter)

    def part(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return self._masters.part(parameter, self.of(parameter))

    def is_counted_in_norm(self, parameter: torch.nn.Parameter) -> bool:
        return True

    def begin_last_backward(self) -> None:
        """Nothing is summed here."""

    def end_micro_batch(self) -> None:
        """Nothing is summed here."""

    def finish(self, factor: float) -> None:
        multiply([self.of(parameter) for parameter in self._masters.of], factor)

    def clear(self) -> None:
        self._sums.clear()

    def _add_to_sum(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        if parameter in self._sums:
            self._sums[parameter].add_(parameter.grad)  # type: ignore[index]
        else:
            self._sums[parameter] = parameter.grad.float()  # type: ignore[index]
        parameter.grad = None

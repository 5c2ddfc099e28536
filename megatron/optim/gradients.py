"""The gradients of a step, added up over its micro-batches: whole ones, which the engine sums over the replicas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import Shard, shard_of
from megatron.optim.masters import WIDE, Masters


class Gradients(Protocol):
    """What a step needs of the gradients that its micro-batches leave.

    Attributes:
        holders: the replicas over which a sum over all gradients is taken; one alone where each has the whole of them.
        are_summed: over the replicas, by themselves: the engine must not do it again.
    """

    holders: Group
    are_summed: bool

    def adopt(self, parameter: torch.nn.Parameter) -> None:
        """Take what backward leaves in ``parameter``, which has its dtype, from now on."""

    def of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the gradient that this rank holds, zeros if no micro-batch has reached ``parameter`` yet."""

    def shard(self, parameter: torch.nn.Parameter) -> Shard:
        """Return where that lies in the global tensor."""

    def part(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return what of it lies where the master does, in one run of memory."""

    def counts_here(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether this replica counts it in sums over ``holders``."""

    def begin_last_backward(self) -> None:
        """Take note that the next backward is the last of the step."""

    def end_micro_batch(self) -> None:
        """Take note that backward is through. Collective where gradients are summed by themselves."""

    def finish(self, factor: float) -> None:
        """Have all gradients where they lie, times ``factor``."""

    def clear(self) -> None:
        """Forget all of them."""


class WholeGradients:
    """Gradients that each replica holds whole: ZeRO 0 and 1.

    Those of 16-bit parameters are added up in fp32 and freed at once, others are where autograd leaves them.
    """

    holders, are_summed = SINGLE, False

    def __init__(self, masters: Masters) -> None:
        self._masters = masters
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}

    def adopt(self, parameter: torch.nn.Parameter) -> None:
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

    def shard(self, parameter: torch.nn.Parameter) -> Shard:
        return shard_of(parameter)

    def part(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return self._masters.part(parameter, self.of(parameter))

    def counts_here(self, parameter: torch.nn.Parameter) -> bool:
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


class EngineGradients:
    """What ``tds`` asks of an optimizer's gradients (``tds.gradients.GradientSource``).

    The engine adds up over micro-batches by autograd, over stages and replicas itself; the optimizer multiplies, takes
    the norm and clips in its own step, and forgets the gradients at its end.
    """

    come_in_hooks = takes_unfrozen = are_multiplied_in_step = clips_itself = True
    norm_is_scaled = False

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the accumulated gradient, zeros if no micro-batch has reached ``parameter`` yet."""
        gradient = self._optimizer.gradient_of(parameter)
        if gradient is None:  # trained, and in no group of the optimizer
            gradient = parameter.grad = torch.zeros_like(parameter)
        return gradient

    def loss_scale(self) -> float:
        """Return what each loss is multiplied by ahead of its backward."""
        return float(self._optimizer.loss_scale)

    def before_backward(self) -> None:
        """Nothing is to be done: hooks take what autograd leaves."""

    def after_backward(self) -> None:
        """Nothing is to be done."""

    def before_step(self) -> None:
        """Nothing is to be done."""

    def after_step(self) -> None:
        """Forget all gradients."""
        self._optimizer.zero_grad()

    def forget(self) -> None:
        """Forget those of a batch on which no step is taken."""
        self._optimizer.zero_grad()


@torch.no_grad()
def multiply(gradients: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply each by ``factor``, in place."""
    held = list(gradients)
    if factor != 1.0 and held:
        torch._foreach_mul_(held, factor)

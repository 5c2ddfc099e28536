"""Sum group.

Norms, the biases behind row-parallel products and what else lies between the tensor-parallel regions is held whole by
every tensor rank. With --sequence-parallel each sees a part of the positions there, and its gradient is a summand.
They are added up once a step, behind the sums over micro-batches, replicas and tied copies, in the type of those, in
one message: a copy of a few vectors for each layer, a table of positions [max_positions, h], BERT's transform [h, h].
The copy is there when the activations are not, and ``megatron.costs.memory`` leaves it out.

Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.mpu.groups import Group
from megatron.mpu.mappings import all_reduce
from megatron.mpu.shard import is_partial
from tds.gradients import is_reduced_apart, reduce_gradients


class SequenceParallelGradients:
    """The parameters of one rank whose gradients are summands.

    Args:
        group: the tensor ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._parameters: list[torch.nn.Parameter] = []

    def register(self, parameter: torch.nn.Parameter) -> None:
        """Sum the gradient of ``parameter`` from now on, if it is a summand."""
        if self._group.size > 1 and is_partial(parameter):
            self._parameters.append(parameter)

    @torch.no_grad()
    def sum(self, gradient_of: Callable[[torch.nn.Parameter], torch.Tensor]) -> None:
        """Replace the gradients by their sums. Collective over the tensor ranks."""
        gradients = [gradient_of(parameter) for parameter in self._parameters]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            same = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = all_reduce(torch.cat([gradient.reshape(-1) for gradient in same]), self._group)
            for gradient, summed in zip(same, flat.split([each.numel() for each in same]), strict=True):
                gradient.copy_(summed.view_as(gradient))


class ExpertGradients:
    """The parameters of this rank's experts, where ranks of the data group have others.

    Their gradients are summed once a step, behind the sums over micro-batches, where they lie.

    Args:
        group: the ranks that have the same experts.

    Attributes:
        are_there: whether there are any.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._parameters: list[torch.nn.Parameter] = []
        self.are_there = False

    def register(self, parameter: torch.nn.Parameter) -> None:
        """Sum the gradient of ``parameter`` from now on, if it is of an expert that not all replicas have."""
        if is_reduced_apart(parameter):
            self._parameters.append(parameter)
            self.are_there = True

    @torch.no_grad()
    def sum(self, gradient_of: Callable[[torch.nn.Parameter], torch.Tensor]) -> None:
        """Replace the gradients by their sums. Collective over those with the same experts."""
        if self.are_there:
            reduce_gradients([gradient_of(parameter) for parameter in self._parameters], self._group.handle)

"""Gradients of weights that each tensor rank has applied to its part of the sequence: the sum over the ranks.

Norms, the biases behind row-parallel products and what else lies between the tensor-parallel regions is held whole by
every tensor rank. With --sequence-parallel each sees a part of the positions there, and its gradient is a summand. They
are added up once a step, behind the sums over micro-batches, replicas and tied copies, in the type of those, in one
message: a copy of a few vectors for each layer, a table of positions [max_positions, h], BERT's transform [h, h]. The
copy is there when the activations are not, and ``megatron.cost`` leaves it out.

Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.mpu.groups import Group
from megatron.mpu.mappings import all_reduce
from megatron.mpu.shard import is_partial


class PartialGradients:
    """The parameters of one rank whose gradients are summands, and whether they have been summed.

    Args:
        group: the tensor ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._parameters: list[torch.nn.Parameter] = []
        self._are_summed = False

    def adopt(self, parameter: torch.nn.Parameter) -> None:
        """Sum the gradient of ``parameter`` from now on, if it is a summand."""
        if self._group.size > 1 and is_partial(parameter):
            self._parameters.append(parameter)

    @torch.no_grad()
    def sum(self, gradient_of: Callable[[torch.nn.Parameter], torch.Tensor]) -> None:
        """Replace the gradients by their sums, once for each step. Collective over the tensor ranks."""
        if self._are_summed:
            return
        self._are_summed = True
        gradients = [gradient_of(parameter) for parameter in self._parameters]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            same = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = all_reduce(torch.cat([gradient.reshape(-1) for gradient in same]), self._group)
            for gradient, summed in zip(same, flat.split([each.numel() for each in same]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def clear(self) -> None:
        """Take note that gradients begin anew."""
        self._are_summed = False

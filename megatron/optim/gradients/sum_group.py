"""SumGroup: gradients that are summed over a further group in addition to the replicas.

| parameters | group | reason |
|---|---|---|
| sequence-parallel: norms, biases of row-parallel layers, positions | tensor ranks | a rank has only its positions |
| experts that only some replicas have | ranks with the same experts | the sum over all replicas excludes them |

Both sums run once per step, in the dtype of the accumulated gradients, after the sums over micro-batches, replicas and
tied copies. ``megatron.costs.memory`` does not count the buffer in which small gradients are sent, because the
activations have been freed by then.

Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.mpu.groups import Group
from tds.gradients import reduce_gradients


class SumGroup:
    """Parameters whose gradients are summed over ``group``.

    Args:
        group: the ranks over which the gradients are summed.
        applies_to: returns True if a parameter's gradient must be summed over ``group``.
    """

    def __init__(self, group: Group, applies_to: Callable[[torch.Tensor], bool]) -> None:
        self._group = group
        self._applies_to = applies_to
        self._parameters: list[torch.nn.Parameter] = []

    def register(self, parameter: torch.nn.Parameter) -> None:
        """Include ``parameter`` in later sums if its gradient must be summed over the group."""
        if self._group.size > 1 and self._applies_to(parameter):
            self._parameters.append(parameter)

    @torch.no_grad()
    def sum(self, grad_of: Callable[[torch.nn.Parameter], torch.Tensor]) -> None:
        """Replace the gradients by their sums. Collective over the group."""
        if self._parameters:
            reduce_gradients([grad_of(parameter) for parameter in self._parameters], self._group.handle)

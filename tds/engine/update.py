"""Update: the interface by which the engine steps the optimizer.

``tds.deepspeed.engine.EngineUpdate`` is the implementation for DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch


class Update(Protocol):
    """Clips the gradients, updates the weights and counts the steps."""

    @property
    def num_steps(self) -> int:
        """Number of updates so far."""

    def step(self) -> None:
        """Update the weights from complete gradients. Collective."""

    def zero_grad(self) -> None:
        """Free the module's parameter gradients."""


class OptimizerUpdate:
    """Update for an optimizer with torch's interface, in a ``ScheduleEngine`` without DeepSpeed.

    Args:
        clip: clips the gradients; called before each step. Collective.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter], clip: Callable[[], None]
    ) -> None:
        self.num_steps = 0
        self._optimizer, self._parameters, self._clip = optimizer, list(parameters), clip

    def step(self) -> None:
        self._clip()
        self._optimizer.step()
        self.zero_grad()
        self.num_steps += 1

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

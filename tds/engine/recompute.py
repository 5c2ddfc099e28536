"""Recompute: what a stage asks of the activation recomputation of its layers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Recompute(Protocol):
    """Activation recomputation of the layers of one stage.

    A module without it has no ``activation_checkpoint_interval``, or 0.
    """

    def running(self, module: Any) -> AbstractContextManager[None]:
        """Return a context in which the forward of ``module`` runs as it is configured."""

    def is_reentrant(self, module: Any) -> bool:
        """Return True if the float inputs of the first stage must require a gradient."""

    def discard(self) -> None:
        """Drop what a forward pass without a backward pass has stored."""

    def preserving_state(self, module: Any) -> AbstractContextManager[None]:
        """Return a context after which random number states and counts of forward passes are as before."""


class NoRecompute:
    """Layers that are not recomputed, or that recompute on their own."""

    def running(self, module: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def is_reentrant(self, module: Any) -> bool:
        return False

    def discard(self) -> None:
        return None

    def preserving_state(self, module: Any) -> AbstractContextManager[None]:
        return nullcontext()

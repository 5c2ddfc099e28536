"""Recompute: the interface between a stage and the activation recomputation of its layers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Recompute(Protocol):
    """Activation recomputation of the layers of one stage.

    A module without recomputation has no ``activation_checkpoint_interval``, or has it set to 0.
    """

    def running(self, module: Any) -> AbstractContextManager[None]:
        """Return a context in which the forward of ``module`` runs with the configured recomputation."""

    def is_reentrant(self, module: Any) -> bool:
        """Return True if recomputation is reentrant: then float inputs of the first stage must require a gradient."""

    def discard(self) -> None:
        """Drop the state that a forward pass without a backward pass has stored."""

    def preserving_state(self, module: Any) -> AbstractContextManager[None]:
        """Return a context that restores random number states, and counts of forwards that seed layers, at its end."""


class NoRecompute:
    """Implementation for layers that are not recomputed, or that recompute without the engine."""

    def running(self, module: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def is_reentrant(self, module: Any) -> bool:
        return False

    def discard(self) -> None:
        return None

    def preserving_state(self, module: Any) -> AbstractContextManager[None]:
        return nullcontext()

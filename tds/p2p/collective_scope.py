"""This process's current collective, for the watchdog and for errors about lost ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class PeerLost(RuntimeError):
    """Raised if another rank is gone or timed out. ``__cause__`` is the backend's error."""


class CollectiveTracker:
    """One engine's collective operations.

    Attributes:
        operation: describes the current or failed collective; None if there is none.
        history: receives a line for each collective that ends.
    """

    def __init__(self, history: deque[Any]) -> None:
        self.operation: str | None = None
        self.history = history

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Attribute the collectives in the block to this engine. Blocks nest, since one engine may call another."""
        global _active_tracker
        outer, _active_tracker = _active_tracker, self
        try:
            yield
        finally:
            _active_tracker = outer

    def reset(self) -> None:
        """Reset ``operation`` after an error, for this engine and for ``idle_tracker``."""
        self.operation = idle_tracker.operation = None


idle_tracker = CollectiveTracker(deque(maxlen=1))
"""The process's collectives while no engine is running."""
_active_tracker = idle_tracker
_num_scopes = 0


@contextmanager
def collective_scope(stage: int, operation: str) -> Iterator[None]:
    """Name the collectives in the block for the watchdog and for errors.

    Raises:
        PeerLost: a RuntimeError was raised in the block; the message names ``stage`` and ``operation``.
    """
    global _num_scopes
    tracker = _active_tracker
    outer, tracker.operation = tracker.operation, operation
    _num_scopes += 1
    try:
        yield
    except RuntimeError as error:  # ``operation`` is not reset, so that ``EngineWatchdog.watch`` can report it
        raise PeerLost(f"stage {stage} lost a rank while {operation}: {error}") from error
    except BaseException:
        tracker.operation = outer
        raise
    tracker.operation = outer
    tracker.history.append(f"ended {operation}")


def current_collective() -> str | None:
    """Describe this process's current or failed collective; None if there is none."""
    return _active_tracker.operation


def num_collective_scopes() -> int:
    """Count the collective scopes that this process has entered, to distinguish scopes with equal names."""
    return _num_scopes

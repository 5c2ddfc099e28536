"""The current collective of this process, for the watchdog and for the errors of lost ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class PeerLost(RuntimeError):
    """Raised if another rank is gone or timed out. ``__cause__`` is the backend's error."""


class Together:
    """The collective operations of one engine.

    Attributes:
        doing: description of the current or failed collective; None if there is none.
        history: receives a line for each collective that ends.
    """

    def __init__(self, history: deque[Any]) -> None:
        self.doing: str | None = None
        self.history = history

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Attribute the collectives in the block to this engine. Blocks nest, since one engine may call another."""
        global _present
        outer, _present = _present, self
        try:
            yield
        finally:
            _present = outer

    def forget(self) -> None:
        """Reset ``doing`` after an error, for this engine and for ``outside``."""
        self.doing = outside.doing = None


outside = Together(deque(maxlen=1))
"""The collectives of the process while no engine is running."""
_present = outside
_number = 0


@contextmanager
def collective_scope(stage: int, doing: str) -> Iterator[None]:
    """Name the collectives in the block for the watchdog and for errors.

    Raises:
        PeerLost: a RuntimeError was raised in the block; the message names ``stage`` and ``doing``.
    """
    global _number
    present = _present
    outer, present.doing = present.doing, doing
    _number += 1
    try:
        yield
    except RuntimeError as error:  # ``doing`` is not reset, so that ``EngineWatchdog.over`` can report it
        raise PeerLost(f"stage {stage} lost a rank while {doing}: {error}") from error
    except BaseException:
        present.doing = outer
        raise
    present.doing = outer
    present.history.append(f"ended {doing}")


def current_collective() -> str | None:
    """Return the description of this process's current or failed collective; None if there is none."""
    return _present.doing


def number_together() -> int:
    """Return how many collective scopes this process has entered, which distinguishes scopes with equal names."""
    return _number

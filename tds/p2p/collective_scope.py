"""The collective or message that this process currently waits for, named in errors of lost ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class PeerLost(RuntimeError):
    """A rank that this one waited for is gone, or did not come in time; its cause is the backend's own error."""


class Together:
    """What one engine does together with other ranks.

    Attributes:
        doing: in words, or what it was when that failed; None if nothing.
        history: gets what ends, in words.
    """

    def __init__(self, history: deque[Any]) -> None:
        self.doing: str | None = None
        self.history = history

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Count what the process waits for in here as this engine's: one engine may run within another's call."""
        global _present
        before, _present = _present, self
        try:
            yield
        finally:
            _present = before

    def forget(self) -> None:
        """Drop what an earlier error has left, here and outside of all engines."""
        self.doing = outside.doing = None


outside = Together(deque(maxlen=1))
"""Of the process while no engine is at work."""
_present = outside
_number = 0


@contextmanager
def collective_scope(stage: int, doing: str) -> Iterator[None]:
    """Let an error of a collective say which stage was ``doing`` what, and the watchdog while it lasts.

    Raises:
        PeerLost: in place of a RuntimeError within.
    """
    global _number
    present = _present
    before, present.doing = present.doing, doing
    _number += 1
    try:
        yield
    except RuntimeError as error:  # ``doing`` stays, for the watchdog to tell until its ``over`` ends
        raise PeerLost(f"stage {stage} lost a rank while {doing}: {error}") from error
    except BaseException:
        present.doing = before
        raise
    present.doing = before
    present.history.append(f"ended {doing}")


def current_collective() -> str | None:
    """Return what this process is doing together with others, or was when that failed; None if nothing."""
    return _present.doing


def number_together() -> int:
    """Return how often this process began to wait together with others: two waits of one name are not one."""
    return _number

"""The words for a rank that is gone: gloo and NCCL say neither who waited nor for what."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_doing: str | None = None
_number = 0
_history: deque[Any] = deque(maxlen=1)


@contextmanager
def waiting_together(stage: int, doing: str) -> Iterator[None]:
    """Let an error of a collective say which stage was ``doing`` what, and the watchdog while it lasts."""
    global _doing, _number
    outer, _doing = _doing, doing
    _number += 1
    try:
        yield
    except RuntimeError as error:  # _doing is left as it is, for the watchdog to tell until its ``over`` ends
        raise RuntimeError(f"stage {stage} lost a rank while {doing}: {error}") from error
    except BaseException:
        _doing = outer
        raise
    _doing = outer
    _history.append(f"ended {doing}")


def doing_together() -> str | None:
    """Return what this process is doing together with others, or was when that failed; None if nothing."""
    return _doing


def number_together() -> int:
    """Return how often this process began to wait together with others: two waits of one name are not one."""
    return _number


def remember_in(history: deque[Any]) -> None:
    """Append what ends from now on, in words, to ``history``: that of the engine that is at work."""
    global _history
    _history = history


def forget() -> None:
    """Drop what an earlier error has left."""
    global _doing
    _doing = None

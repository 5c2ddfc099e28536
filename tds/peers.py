"""The words for a rank that is gone: gloo and NCCL say neither who waited nor for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_doing: str | None = None


@contextmanager
def waiting_together(stage: int, doing: str) -> Iterator[None]:
    """Let an error of a collective say which stage was ``doing`` what, and the watchdog while it lasts."""
    global _doing
    outer, _doing = _doing, doing
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"stage {stage} lost a rank while {doing}: {error}") from error
    _doing = outer  # left as it was after an error, for the watchdog to tell


def doing_together() -> str | None:
    """Return what this process is doing together with others, or was when that failed; None if nothing."""
    return _doing


def forget() -> None:
    """Drop what an earlier error has left."""
    global _doing
    _doing = None

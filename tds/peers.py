"""The words for a rank that is gone: gloo and NCCL say neither who waited nor for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def waiting_together(stage: int, doing: str) -> Iterator[None]:
    """Let an error of a collective say which stage was ``doing`` what."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"stage {stage} lost a rank while {doing}: {error}") from error

"""Progress of a tool: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from megatron import log

_SECONDS_BETWEEN_LINES = 5.0


class Show(Protocol):
    """Says how much is done, and the rest in words."""

    def __call__(self, done: int, text: str) -> None: ...


@contextmanager
def progress(title: str, total: int, already: int = 0) -> Iterator[Show]:
    """Show how much of ``total`` is done as the returned function is called.

    Args:
        total: 0 where nobody knows it.
        already: what was done before and tells nothing about the time that is left.
    """
    if sys.stderr.isatty():
        with _bar(title, total) as show:
            yield show
    else:
        yield _Lines(title, total, already)


@contextmanager
def _bar(title: str, total: int) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total or None, text="")
        yield lambda done, text: bar.update(task, completed=done, text=text)


class _Lines:
    def __init__(self, title: str, total: int, already: int) -> None:
        self._title, self._total, self._already = title, total, already
        self._start = self._last = time.monotonic()

    def __call__(self, done: int, text: str) -> None:
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        share = f"{100 * done / self._total:.0f}%, " if self._total else ""
        left = ""
        if self._total and done > self._already:
            seconds = (now - self._start) * (self._total - done) / (done - self._already)
            left = f", {in_words(seconds)} left"
        log.info(f"{self._title}: {share}{text}{left}")


def in_words(seconds: float) -> str:
    """Return a span of time as 42 s, 3:07 min or 2:05 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02d} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02d} h"

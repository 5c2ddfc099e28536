"""Progress of a tool: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from megatron import log

_SECONDS_BETWEEN_LINES = 5.0


class Advance(Protocol):
    """Says that work was done, and how the state is told."""

    def __call__(self, amount: int, text: str) -> None: ...


@contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """Show how much of ``total`` is done as the returned function is called."""
    if sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=total, text="")
            yield lambda amount, text: bar.update(task, advance=amount, text=text)
    else:
        yield _Lines(title, total)


class _Lines:
    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._last = time.monotonic()

    def __call__(self, amount: int, text: str) -> None:
        self._done += amount
        if time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            log.info(f"{self._title}: {100 * self._done / max(self._total, 1):.0f}% {text}")

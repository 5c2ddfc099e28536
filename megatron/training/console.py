"""Console output: tables, lines and a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from megatron.console import print_table


class TrainingConsole:
    """Prints plain lines to standard output, with a progress bar below them on a terminal.

    Args:
        mode: auto, bar or plain.
        total_steps: steps at the end of the bar.
    """

    def __init__(self, mode: str, total_steps: int) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.has_bar = mode == "bar" or (mode == "auto" and sys.stdout.isatty())
        self._bar: Progress | None = None
        self.total_steps = total_steps
        if self.has_bar:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[loss]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
        self._task: Any = None

    def table(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """Print a two-column table with a title."""
        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column(no_wrap=True, style="bold")
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(Text(name), Text(value))
        print_table(table, self.console, soft_wrap=False)

    def line(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        self.console.print(text, markup=False)

    def advance(self, step: int, loss: float) -> None:
        """Move the bar to ``step``."""
        if self._bar is None:
            return
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("training", total=self.total_steps, loss="")
        self._bar.update(self._task, completed=step, total=self.total_steps, loss=f"loss {loss:.4f}")

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None and self._task is not None:
            self._bar.stop()
            self._task = None

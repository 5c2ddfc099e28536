"""Print tables with the terminal's width; in files, columns are at least as wide as their longest word."""

from __future__ import annotations

import sys
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_UNBOUNDED = 1 << 20
_FILE_WIDTH = 160


def print_table(table: Table, console: Console | None = None, **options: Any) -> None:
    """Print a table.

    If the output is not a terminal, words are never broken over two lines, so that a path in a log file can be copied
    and searched for. The table is then as wide as its longest words require.

    Args:
        console: console to print to; by default standard output, 160 columns wide if it is not a terminal.
        options: passed to ``Console.print``.
    """
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH, markup=False)
    if console.is_terminal:
        console.print(table, **options)
        return
    for column in table.columns:
        cells = [cell if isinstance(cell, Text) else Text(str(cell)) for cell in column.cells]
        lines = [line for cell in cells for line in cell.plain.splitlines()]
        words = lines if column.no_wrap else [word for line in lines for word in line.split()]
        column.min_width = max([column.min_width or 0, *map(cell_len, words)])
    title = table.title.plain if isinstance(table.title, Text) else str(table.title or "")
    table.min_width = max([table.min_width or 0, *map(cell_len, title.split())])
    width = console.width
    console.width = max(width, Measurement.get(console, console.options.update(width=_UNBOUNDED), table).minimum)
    try:
        console.print(table, **options)
    finally:
        console.width = width

"""Tests over the rows of a table: one test that reports every failing row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Row = TypeVar("Row")


def check_rows(rows: Iterable[Row], check: Callable[[Row], Any]) -> None:
    """Call ``check`` with each row; a separate test per row would take longer to set up than to run.

    Raises:
        AssertionError: ``check`` raised for some rows; the message has each such row with its error.
    """
    failures, rows = [], list(rows)
    assert rows, "the table is empty"
    for row in rows:
        try:
            check(row)
        except Exception as error:
            failures.append(f"{row}: {type(error).__name__}: {error}")
    assert not failures, f"{len(failures)} of {len(rows)} rows fail:\n" + "\n".join(failures)

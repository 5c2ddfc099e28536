"""DeepSpeed's own lines on the screen: off unless asked for by ``TDS_VERBOSE=1`` or ``tds.quiet(False)``."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tds.compatibility import IS_VERBOSE, log_from, theirs

SPEAKERS = ("deepspeed.runtime.pipe.module", "deepspeed.runtime.pipe.topology", "deepspeed.runtime.utils")
"""Modules with a ``print``."""
_is_quiet = not IS_VERBOSE


def quiet(on: bool = True) -> None:
    """Switch DeepSpeed's informational lines off (``on``) or on; warnings always show."""
    global _is_quiet
    _is_quiet = on
    log_from(logging.WARNING if on else logging.INFO)


@contextmanager
def without_prints() -> Iterator[None]:
    """Drop the ``print`` lines of DeepSpeed's own modules meanwhile; a user's prints stay."""
    if not _is_quiet:
        yield
        return
    modules = [theirs(name) for name in SPEAKERS]
    for module in modules:
        module.print = _drop
    try:
        yield
    finally:
        for module in modules:
            module.print = builtins.print


def _drop(*_: Any, **__: Any) -> None:
    return None

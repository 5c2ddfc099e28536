"""DeepSpeed's own lines on the screen: off unless asked for by ``TDS_VERBOSE=1`` or ``tds.quiet(False)``."""

from __future__ import annotations

import builtins
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime import utils as _runtime_utils
from deepspeed.runtime.pipe import module as _pipe_module
from deepspeed.runtime.pipe import topology as _pipe_topology
from deepspeed.utils import logger as _deepspeed_logger

SPEAKERS = (_pipe_module, _pipe_topology, _runtime_utils)
_is_quiet = os.environ.get("TDS_VERBOSE", "0") in ("", "0")


def quiet(on: bool = True) -> None:
    """Switch DeepSpeed's informational lines off (``on``) or on; warnings always show."""
    global _is_quiet
    _is_quiet = on
    level = logging.WARNING if on else logging.INFO
    _deepspeed_logger.setLevel(level)
    for handler in _deepspeed_logger.handlers:
        handler.setLevel(level)


@contextmanager
def without_prints() -> Iterator[None]:
    """Drop the ``print`` lines of DeepSpeed's own modules meanwhile; a user's prints stay."""
    if not _is_quiet:
        yield
        return
    for module in SPEAKERS:
        module.print = _drop  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in SPEAKERS:
            module.print = builtins.print  # type: ignore[attr-defined]


def _drop(*_: Any, **__: Any) -> None:
    return None


if not _is_quiet:
    quiet(False)

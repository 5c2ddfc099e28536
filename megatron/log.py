"""The project's logger: rank 0 logs everything, other ranks only warnings and errors."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Sequence

# The training entry point calls ``configure(rank)`` once per process. Without it, as in a tool, messages are written to
# standard error without a rank.

_LOGGER = logging.getLogger("megatron")
_BYTES = {"B": 1} | {f"{prefix}B": 1000**n for n, prefix in enumerate("kMGT", 1)}
_BYTES |= {f"{prefix}iB": 1024**n for n, prefix in enumerate("KMGT", 1)}


class _CurrentStderr(logging.StreamHandler):
    """Writes to the current ``sys.stderr``, so that forked ranks and captured tests write to separate streams."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[override]
        return sys.stderr


LEVEL_VARIABLE = "MEGATRON_LOG_LEVEL"
"""Environment variable with the log level of rank 0; debug adds fingerprints and other details."""


def configure(rank: int = 0, level: str | None = None) -> None:
    """Set up this process's logger; ranks other than 0 only log warnings and errors, prefixed with the rank.

    Args:
        level: rank 0's level: debug, info, warning or error; None uses MEGATRON_LOG_LEVEL, or info if it is not set.
    """
    level = level or os.environ.get(LEVEL_VARIABLE, "").lower()
    level = level if level in ("debug", "info", "warning", "error") else "info"
    for handler_to_remove in _module_handlers():
        _LOGGER.removeHandler(handler_to_remove)
    handler = _CurrentStderr()
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    _LOGGER.addHandler(handler)
    _LOGGER.propagate = False
    _LOGGER.setLevel(getattr(logging, level.upper()) if rank == 0 else logging.WARNING)


def debug(message: str) -> None:
    """Log a detail on rank 0, shown with MEGATRON_LOG_LEVEL=debug."""
    _get_logger().debug(message)


def info(message: str) -> None:
    """Log ``message`` on rank 0."""
    _get_logger().info(message)


def warning(message: str) -> None:
    """Log a warning, on any rank."""
    _get_logger().warning("warning: " + message)


@functools.lru_cache(maxsize=1024)
def warn_once(message: str) -> None:
    """Log a warning; repeated calls with the same text in this process have no effect."""
    warning(message)


@functools.lru_cache(maxsize=1024)
def warn_once_per_job(message: str) -> None:
    """Log a warning on rank 0 only; repeated calls with the same text have no effect."""
    info("warning: " + message)


def error(message: str) -> None:
    """Log an error, on any rank."""
    _get_logger().error(message)


def human_bytes(value: float, units: Sequence[str] = ("B", "KiB", "MiB", "GiB"), digits: int = 2) -> str:
    """Format bytes with the largest unit that does not exceed them, such as 1.50 GiB for 1610612736.

    Callers use powers of 1024 for memory, and powers of 1000 for file sizes and data sheet values.
    """
    unit = next((candidate for candidate in reversed(units) if value >= _BYTES[candidate]), units[0])
    return f"{value / _BYTES[unit]:.{0 if unit == 'B' else digits}f} {unit}"


def _get_logger() -> logging.Logger:
    if not _module_handlers():
        configure()
    return _LOGGER


def _module_handlers() -> list[logging.Handler]:
    """Return the handlers added by this module; a test runner or the user's program may have added others."""
    return [handler for handler in _LOGGER.handlers if isinstance(handler, _CurrentStderr)]


def human_count(value: float) -> str:
    """Format a number with a suffix, such as 33.6M for 33600000."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def human_time(seconds: float) -> str:
    """Format seconds as 1:02:03, or 2:03 below an hour."""
    minutes, second = divmod(round(max(seconds, 0)), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"

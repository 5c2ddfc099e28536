"""Log lines that users should see without configuring logging, such as measurements and automatic choices."""

from __future__ import annotations

import logging

_log = logging.getLogger("tds")


def log_rank_0(text: str) -> None:
    """Log on logger "tds" at level INFO, or at WARNING if INFO is disabled. Callers check the rank."""
    _log.log(logging.INFO if _log.isEnabledFor(logging.INFO) else logging.WARNING, "%s", text)

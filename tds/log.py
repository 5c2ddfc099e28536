"""Lines that a user should see without setting up logging: what was measured and chosen for him."""

from __future__ import annotations

import logging

_log = logging.getLogger("tds")


def log_rank_0(text: str) -> None:
    """Log on "tds" as information; where information is not shown, as a warning."""
    _log.log(logging.INFO if _log.isEnabledFor(logging.INFO) else logging.WARNING, "%s", text)

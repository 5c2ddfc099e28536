"""Mask credentials in URIs, so that no file of a run contains them."""

from __future__ import annotations

import re

MASK = "***"
_USER_INFO = re.compile(r"""(?<=://)[^/?#\s"']+(?=@)""")
_QUERY_SECRET = re.compile(
    r"(?i)(?<=[?&;])([^=&\s]*(?:token|key|secret|password|passwd|sig|credential)[^=&\s]*)=[^&\s'\"#]+"
)


def mask_secrets(text: str) -> str:
    """Replace user names, passwords and secret query values of the URIs in ``text`` by ``***``."""
    return _QUERY_SECRET.sub(rf"\1={MASK}", _USER_INFO.sub(MASK, text))

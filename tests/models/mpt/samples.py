"""A small MPT with known weights."""

from __future__ import annotations

from typing import Any

from megatron.models.mpt.model import MptSizes
from tests.models.common.samples import SMALL


def mpt_sizes(**changes: Any) -> MptSizes:
    """Return the sizes of the small model, with ``changes``."""
    return MptSizes(**{**SMALL, **changes})

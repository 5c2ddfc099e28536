"""A small MPT with known weights."""

from __future__ import annotations

from typing import Any

from megatron.model.sizes import MptSizes
from tests.model.samples import SMALL


def mpt_sizes(**changes: Any) -> MptSizes:
    """Return the sizes of the small model, with ``changes``."""
    return MptSizes(**{**SMALL, **changes})

"""A small MPT with known weights."""

from __future__ import annotations

from typing import Any

from megatron.models.mpt.model import MptModelArgs
from tests.helpers.model_samples import SMALL


def mpt_sizes(**changes: Any) -> MptModelArgs:
    """Return the sizes of the small model, with ``changes``."""
    return MptModelArgs(**{**SMALL, **changes})

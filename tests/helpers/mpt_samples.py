"""A small MPT with known weights."""

from __future__ import annotations

from typing import Any

from megatron.models.common.model_args import ModelArgs
from megatron.models.mpt.config import MptConfig
from tests.helpers.model_samples import SMALL

MPT: dict[str, Any] = {"family": "mpt", "hidden_bias": False, **MptConfig.DEFAULTS}


def mpt_model_args(**overrides: Any) -> ModelArgs:
    """Return the args of the small model, with ``overrides``."""
    return ModelArgs(**{**SMALL, **MPT, **overrides})

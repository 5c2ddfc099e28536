"""A small LLaMA with known weights."""

from __future__ import annotations

from typing import Any

from megatron.models.common.model_args import ModelArgs
from megatron.models.llama.config import LlamaConfig
from tests.helpers.model_samples import SMALL

LLAMA: dict[str, Any] = {"family": "llama", "hidden_bias": False, **LlamaConfig.DEFAULTS}


def llama_model_args(**overrides: Any) -> ModelArgs:
    """Return the args of the small model, which has 4 query heads on 2 key heads, with ``overrides``."""
    return ModelArgs(**{**SMALL, **LLAMA, "num_query_groups": 2, "ff_hidden_size": 24, **overrides})

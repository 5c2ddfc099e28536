"""A small LLaMA with known weights."""

from __future__ import annotations

from typing import Any

from megatron.models.llama.model import LlamaModelArgs
from tests.helpers.model_samples import SMALL


def llama_sizes(**changes: Any) -> LlamaModelArgs:
    """Return the sizes of the small model, of 4 query heads on 2 key heads, with ``changes``."""
    return LlamaModelArgs(**{**SMALL, "num_query_groups": 2, "ff_hidden_size": 24, **changes})

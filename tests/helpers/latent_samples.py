"""A small decoder with multi-latent attention and known weights."""

from __future__ import annotations

from typing import Any

from megatron.models.common.model_args import ModelArgs
from tests.helpers.llama_samples import llama_model_args

LATENT_FIELDS: dict[str, Any] = {
    "multi_latent_attention": True, "num_query_groups": 0, "num_attention_heads": 8, "q_lora_rank": 7,
    "kv_lora_rank": 5, "qk_head_dim": 3, "qk_pos_emb_head_dim": 4, "v_head_dim": 2,
}  # fmt: skip
"""Eight heads, for every size of the tensor and of the context group."""


def latent_model_args(**overrides: Any) -> ModelArgs:
    """Return the args of the small model, with ``overrides``."""
    return llama_model_args(**{**LATENT_FIELDS, "max_position_embeddings": 16, **overrides})

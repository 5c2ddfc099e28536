"""Small decoders with Mamba-2 layers and known weights."""

from __future__ import annotations

from typing import Any

from megatron.models.common.model_args import ModelArgs
from tests.helpers.llama_samples import llama_model_args

MAMBA_FIELDS: dict[str, Any] = {
    "experimental_attention_variant": "mamba2", "mamba_num_heads": 8, "mamba_head_dim": 3, "mamba_num_groups": 2,
    "mamba_state_dim": 5, "mamba_conv_kernel_dim": 4,
}  # fmt: skip
"""Eight heads and two groups, for every size of the tensor group."""
FALCON_MULTIPLIERS = (
    "attention-input=0.7,key=1.3,attention-output=0.6,mamba-input=1.2,mamba-z=0.8,mamba-x=1.1,mamba-b=0.9,mamba-c=1.4,"
    "mamba-dt=0.75,mamba-output=0.65,mlp-gate=1.25,mlp-output=0.55"
)
FALCON_FIELDS: dict[str, Any] = {
    **MAMBA_FIELDS, "experimental_attention_variant": "parallel_mamba2", "mamba_norm": "norm-first",
    "mamba_num_groups": 1, "branch_multipliers": FALCON_MULTIPLIERS,
}  # fmt: skip
"""Parallel heads, as in Falcon-H1."""
NEMOTRON_FIELDS: dict[str, Any] = {
    **MAMBA_FIELDS, "experimental_attention_variant": "none", "hybrid_layer_pattern": "M-M*-", "num_layers": 5,
    "activation": "squared-relu", "position_embedding_type": "none",
}  # fmt: skip
"""Layers with a mixer or a feed-forward half, as in Nemotron-H."""


def mamba_model_args(**overrides: Any) -> ModelArgs:
    """Return the args of the small model, whose layers have Mamba-2 and a feed-forward half, with ``overrides``."""
    return llama_model_args(**{**MAMBA_FIELDS, "max_position_embeddings": 16, **overrides})

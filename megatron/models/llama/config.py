"""LLaMA: the decoder with rotary positions, RMSNorm, a gated activation and an untied head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.decoder import ROPE
from megatron.config.family import FamilyConfig, ModelFamily


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(FamilyConfig):
    """The decoder with rotary positions and RMSNorm; linear layers have biases only with --hidden-bias."""

    DEFAULTS: ClassVar = {
        "position_embedding_type": ROPE,
        "normalization": "RMSNorm",
        "activation": "gated-silu",
        "untie_embeddings": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


FAMILY = ModelFamily(
    name="llama",
    title="LLaMA",
    script="examples/llama/run_llama.sh",
    config=LlamaConfig,
    vocabulary=32000,
    follows={"ff_hidden_size": "--ff-hidden-size", "num_query_groups": "--num-query-groups"},
    variables={"NGROUPS": "num_query_groups", "NFF": "ff_hidden_size"},
    huggingface="megatron.models.llama.huggingface_formats:FORMATS",
)

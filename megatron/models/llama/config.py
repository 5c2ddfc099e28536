"""LLaMA: rotary positions, RMS norms, a gated activation, a head of its own; its line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.decoder import ROPE
from megatron.config.family import FamilyConfig, ModelFamily


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(FamilyConfig):
    """A decoder with rotary positions and RMS norms; biases come with --hidden-bias only."""

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
    huggingface="megatron.models.llama.huggingface:FORMATS",
)

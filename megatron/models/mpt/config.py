"""MPT: the decoder with ALiBi instead of position embeddings, and norms without a bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.decoder import ALIBI
from megatron.config.family import FamilyConfig, ModelFamily


@dataclass(frozen=True, kw_only=True)
class MptConfig(FamilyConfig):
    """The decoder with linear attention biases (ALiBi); it has no other biases, not even in norms."""

    DEFAULTS: ClassVar = {
        "position_embedding_type": ALIBI,
        "norm_bias": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


FAMILY = ModelFamily(
    name="mpt",
    title="MPT",
    script="examples/mpt/run_mpt.sh",
    config=MptConfig,
    vocabulary=50368,
    huggingface="megatron.models.mpt.huggingface:FORMATS",
)

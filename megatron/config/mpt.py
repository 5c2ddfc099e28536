"""What MPT adds: biases of attention that fall with the distance, in place of positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.family import FamilyConfig
from megatron.config.option import option


@dataclass(frozen=True, kw_only=True)
class MptConfig(FamilyConfig):
    """Attention with linear biases (ALiBi); there are no other biases, in norms neither."""

    DEFAULTS: ClassVar = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    IDENTITY: ClassVar = ("alibi_bias_max", "clip_qkv")
    REFITTED: ClassVar = IDENTITY
    NO_IDENTITY: ClassVar = ("max_position_embeddings",)

    alibi_bias_max: int = option(
        8,
        "the slopes of the heads go from 2^(-max/heads) to 2^-max",
        minimum=1,
        families=("mpt",),
        elsewhere="ALiBi is MPT's; leave it out, or use examples/mpt/pretrain_mpt.py",
    )
    clip_qkv: float = option(
        0.0,
        "bring the numbers of queries, keys and values into -clip ... clip; 0: do not",
        minimum=0,
        families=("mpt",),
        elsewhere="it is MPT's; leave it out, or use examples/mpt/pretrain_mpt.py",
    )

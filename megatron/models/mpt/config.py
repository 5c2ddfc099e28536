"""What MPT adds: biases of attention that fall with the distance, in place of positions; its checks and line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.config import Config
from megatron.config.model import FamilyConfig, ModelFamily
from megatron.config.option import option

_NO_TABLE = "MPT has ALiBi in place of positions; leave it out, or use pretrain_t5.py"


@dataclass(frozen=True, kw_only=True)
class MptConfig(FamilyConfig):
    """Attention with linear biases (ALiBi); there are no other biases, in norms neither."""

    DEFAULTS: ClassVar = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    ADVICE: ClassVar = {
        "hidden_bias": "MPT has no biases; leave it out",
        "apply_residual_connection_post_layernorm": "MPT adds to the input of a layer's parts; leave it out",
        "reset_position_ids": "MPT has no positions; --reset-attention-mask alone keeps documents apart",
        "position_embedding_type": _NO_TABLE,
        "relative_attention_num_buckets": _NO_TABLE,
        "relative_attention_max_distance": _NO_TABLE,
    }
    HOLDS: ClassVar = {"--disable-bias-linear": "MPT has no biases"}
    REFUSED: ClassVar = {
        "--use-rotary-position-embeddings": "MPT has ALiBi in place of positions; leave it out",
        "--normalization": "MPT has layer norms without biases; leave it out",
        "--add-qkv-bias": "MPT has no biases; leave it out",
    }
    IDENTITY: ClassVar = ("alibi_bias_max", "clip_qkv")
    REFITTED: ClassVar = IDENTITY
    NO_IDENTITY: ClassVar = ("max_position_embeddings",)

    alibi_bias_max: int = option(
        8,
        "the slopes of the heads go from 2^(-max/heads) to 2^-max",
        minimum=1,
        elsewhere="ALiBi is MPT's; leave it out, or use examples/mpt/pretrain_mpt.py",
        short="ALiBi's largest exponent",
    )
    clip_qkv: float = option(
        0.0,
        "bring the numbers of queries, keys and values into -clip ... clip; 0: do not",
        minimum=0,
        elsewhere="it is MPT's; leave it out, or use examples/mpt/pretrain_mpt.py",
    )

    def check(self, config: Config) -> Iterator[str]:
        if config.model.hidden_bias:
            yield "--hidden-bias must be left out in MPT, whose layers and norms have no biases, got it. Leave it out"


FAMILY = ModelFamily(
    name="mpt", title="MPT", program="examples/mpt/pretrain_mpt.py", config=MptConfig, vocabulary=50368
)

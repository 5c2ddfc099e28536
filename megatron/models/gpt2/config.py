"""GPT-2 is a decoder without flags of its own; its line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.model import FamilyConfig, ModelFamily

_NO_TABLE = "GPT-2 has learned positions; leave it out, or use pretrain_t5.py"


@dataclass(frozen=True, kw_only=True)
class GPT2Config(FamilyConfig):
    """Learned positions and layer norms: what the model's section says of it is all."""

    ADVICE: ClassVar = {
        "position_embedding_type": _NO_TABLE,
        "relative_attention_num_buckets": _NO_TABLE,
        "relative_attention_max_distance": _NO_TABLE,
    }


FAMILY = ModelFamily(
    name="gpt2",
    title="GPT-2",
    program="pretrain_gpt2.py",
    config=GPT2Config,
    recipe=("--hidden-bias", "--attention-dropout", "0", "--hidden-dropout", "0"),
    heads={1280: 20, 1536: 16, 1600: 25, 2560: 32},
    benchmark_flags="--activation gelu-tanh --max-position-embeddings {length}",
)

"""GPT-2: the decoder with learned positions, LayerNorm and a tied head."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.family import FamilyConfig, ModelFamily


@dataclass(frozen=True, kw_only=True)
class GPT2Config(FamilyConfig):
    """The decoder with the default settings."""


FAMILY = ModelFamily(
    name="gpt2",
    title="GPT-2",
    config=GPT2Config,
    recipe=("--hidden-bias", "--attention-dropout", "0", "--hidden-dropout", "0"),
    heads={1280: 20, 1536: 16, 1600: 25, 2560: 32},
    benchmark_flags="--activation gelu-tanh --max-position-embeddings {length}",
    huggingface="megatron.models.gpt2.huggingface:FORMATS",
)

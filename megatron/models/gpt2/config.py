"""GPT-2: learned positions, layer norms, a tied head; its line."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.family import FamilyConfig, ModelFamily


@dataclass(frozen=True, kw_only=True)
class GPT2Config(FamilyConfig):
    """The decoder as its settings are where nothing is said."""


FAMILY = ModelFamily(
    name="gpt2",
    title="GPT-2",
    config=GPT2Config,
    recipe=("--hidden-bias", "--attention-dropout", "0", "--hidden-dropout", "0"),
    heads={1280: 20, 1536: 16, 1600: 25, 2560: 32},
    benchmark_flags="--activation gelu-tanh --max-position-embeddings {length}",
    huggingface="megatron.models.gpt2.huggingface:FORMATS",
)

"""What LLaMA adds: groups of heads that share keys and values, and rotary positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from megatron.config.data import DataConfig
from megatron.config.family import FamilyConfig
from megatron.config.model import ModelConfig
from megatron.config.option import option

_ROTARY = "rotary positions are LLaMA's; leave it out, or use examples/llama/pretrain_llama.py"
_rotary = partial(option, families=("llama",), elsewhere=_ROTARY)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(FamilyConfig):
    """Grouped-query attention and rotary positions; RMS norms are fixed, biases come with --hidden-bias only."""

    DEFAULTS: ClassVar = {
        "activation": "gated-silu",
        "untie_embeddings": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    IDENTITY: ClassVar = (
        "num_query_groups",
        "rotary_base",
        "rotary_scaling",
        "rotary_scaling_factor",
        "rotary_low_frequency_factor",
        "rotary_high_frequency_factor",
        "rotary_original_positions",
    )
    REFITTED: ClassVar = IDENTITY[1:]
    NO_IDENTITY: ClassVar = ("max_position_embeddings",)

    num_query_groups: int = option(
        0,
        "heads of keys and values, each shared by as many query heads (grouped-query attention)",
        minimum=1,
        shown_default="num-attention-heads",
        aliases=("--num-key-value-heads",),
        families=("llama",),
        elsewhere="there are as many key heads as query heads; leave it out, or use examples/llama/pretrain_llama.py",
    )
    rotary_base: float = _rotary(
        10000.0, "base of the rotary positions' frequencies", above=1, aliases=("--rope-theta",)
    )
    rotary_scaling: str = _rotary(
        "none",
        "how rotary positions reach beyond the length of an earlier training: linear divides each position by the "
        "factor; llama3 divides the low frequencies only",
        choices=("none", "linear", "llama3"),
    )
    rotary_scaling_factor: float = _rotary(
        8.0, "by what --rotary-scaling divides", minimum=1, aliases=("--rope-scaling-factor",)
    )
    rotary_low_frequency_factor: float = _rotary(
        1.0, "of llama3: waves longer than the earlier length over this are divided", above=0
    )
    rotary_high_frequency_factor: float = _rotary(
        4.0, "of llama3: waves shorter than the earlier length over this stay; those between lie between", above=0
    )
    rotary_original_positions: int = _rotary(8192, "of llama3: the earlier length, in tokens", minimum=1)

    @property
    def summary(self) -> str:
        return f"{self.num_query_groups} heads of keys"

    def resolved(self, model: ModelConfig, data: DataConfig) -> LlamaConfig:
        return replace(self, num_query_groups=self.num_query_groups or model.num_attention_heads)

    def problems(self) -> Iterator[str]:
        low, high = self.rotary_low_frequency_factor, self.rotary_high_frequency_factor
        if self.rotary_scaling == "llama3" and low >= high:
            yield (
                "--rotary-high-frequency-factor must exceed --rotary-low-frequency-factor, got "
                f"{high:g} and {low:g}. Raise the first"
            )

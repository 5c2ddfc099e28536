"""What LLaMA adds: groups of heads that share keys and values, and rotary positions; its checks and line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from megatron.config.config import Config
from megatron.config.data import DataConfig
from megatron.config.model import FamilyConfig, ModelConfig, ModelFamily
from megatron.config.option import option

_ROTARY = "rotary positions are LLaMA's; leave it out, or use examples/llama/pretrain_llama.py"
_NO_TABLE = "LLaMA has rotary positions; leave it out, or use pretrain_t5.py"
_rotary = partial(option, elsewhere=_ROTARY)

SCALING = ("rotary_scaling_factor",)
"""Fields that act with a scaling only."""
LLAMA3 = ("rotary_low_frequency_factor", "rotary_high_frequency_factor", "rotary_original_positions")
"""Fields that act with the scaling llama3 only."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(FamilyConfig):
    """Grouped-query attention and rotary positions; RMS norms are fixed, biases come with --hidden-bias only."""

    DEFAULTS: ClassVar = {
        "activation": "gated-silu",
        "untie_embeddings": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    ADVICE: ClassVar = {
        "apply_residual_connection_post_layernorm": "LLaMA adds to the input of a layer's parts; leave it out",
        "position_embedding_type": _NO_TABLE,
        "relative_attention_num_buckets": _NO_TABLE,
        "relative_attention_max_distance": _NO_TABLE,
    }
    REFUSED: ClassVar = {
        "--use-rotary-position-embeddings": "LLaMA has rotary positions anyway; leave it out",
        "--group-query-attention": "--num-query-groups does it alone; leave it out",
        "--swiglu": "LLaMA has --activation gated-silu anyway; leave it out",
        "--squared-relu": "LLaMA has a gated activation; leave it out",
        "--normalization": "LLaMA has RMS norms; leave it out",
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
        elsewhere="there are as many key heads as query heads; leave it out, or use examples/llama/pretrain_llama.py",
        short="k, v heads",
    )
    rotary_base: float = _rotary(
        10000.0,
        "base of the rotary positions' frequencies",
        above=1,
        aliases=("--rope-theta",),
        short="base of the frequencies",
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

    def check(self, config: Config) -> Iterator[str]:
        yield from super().check(config)
        yield from self.model_problems(config)
        for names, allowed in ((SCALING, ("linear", "llama3")), (LLAMA3, ("llama3",))):
            named = [f"--{name.replace('_', '-')}" for name in names if name in config.given]
            if named and self.rotary_scaling not in allowed:
                yield (
                    f"{', '.join(named)} acts with --rotary-scaling {' or '.join(allowed)} only, got "
                    f"{self.rotary_scaling}. Leave it out, or add that"
                )

    def model_problems(self, config: Config) -> Iterator[str]:
        yield from self._group_problems(config)
        model = config.model
        if model.kv_hidden_size % 2:
            yield (
                "--kv-hidden-size, the size of one head, must be even for rotary positions, which turn pairs of "
                f"numbers, got {model.kv_hidden_size}. Change --num-attention-heads or --kv-hidden-size"
            )
        if not model.activation.startswith("gated-"):
            yield f"--activation must be gated-silu or gated-gelu in LLaMA, got {model.activation}. Leave it out"

    def _group_problems(self, config: Config) -> Iterator[str]:
        heads, groups = config.model.num_attention_heads, self.num_query_groups
        t = config.parallel.model_parallel_size
        if heads % groups:
            works = [n for n in range(1, heads + 1) if heads % n == 0]
            yield (
                f"--num-attention-heads must be a multiple of --num-query-groups, got {heads} and {groups}: each head "
                f"of keys serves as many query heads. Use one of {works} groups"
            )
        elif groups % t and heads % t == 0:
            works = [n for n in range(1, groups + 1) if groups % n == 0]
            yield (
                f"--num-query-groups must be a multiple of --model-parallel-size, got {groups} and {t}: a head of keys "
                "and values on several ranks would have to be computed on each of them, and its gradient summed over "
                f"them. Use --model-parallel-size with one of {works}, or more groups"
            )


FAMILY = ModelFamily(
    name="llama",
    title="LLaMA",
    program="examples/llama/pretrain_llama.py",
    config=LlamaConfig,
    vocabulary=32000,
    follows={"ff_hidden_size": "--ff-hidden-size", "num_query_groups": "--num-query-groups"},
    variables={"NGROUPS": "num_query_groups", "NFF": "ff_hidden_size"},
)

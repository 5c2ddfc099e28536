"""Checks of LLaMA that need more than its own section: heads, groups, activation, flags that could not act."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config import decoder_checks
from megatron.config.config import Config

SCALING = ("rotary_scaling_factor",)
"""Fields that act with a scaling only."""
LLAMA3 = ("rotary_low_frequency_factor", "rotary_high_frequency_factor", "rotary_original_positions")
"""Fields that act with the scaling llama3 only."""


def problems(config: Config) -> Iterator[str]:
    """Yield what cannot be, and what was given and cannot act."""
    yield from decoder_checks.problems(config)
    yield from model_problems(config)
    scaling = config.llama.rotary_scaling
    for names, allowed in ((SCALING, ("linear", "llama3")), (LLAMA3, ("llama3",))):
        named = [f"--{name.replace('_', '-')}" for name in names if name in config.given]
        if named and scaling not in allowed:
            yield (
                f"{', '.join(named)} acts with --rotary-scaling {' or '.join(allowed)} only, got {scaling}. Leave it "
                "out, or add that"
            )


def model_problems(config: Config) -> Iterator[str]:
    """Yield what cannot be of the model alone, wherever its settings come from."""
    yield from _group_problems(config)
    model = config.model
    if model.kv_hidden_size % 2:
        yield (
            "--kv-hidden-size, the size of one head, must be even for rotary positions, which turn pairs of numbers, "
            f"got {model.kv_hidden_size}. Change --num-attention-heads or --kv-hidden-size"
        )
    if not model.activation.startswith("gated-"):
        yield f"--activation must be gated-silu or gated-gelu in LLaMA, got {model.activation}. Leave it out"


def notes(config: Config) -> Iterator[str]:
    """Yield what comes from defaults, cannot act, and does no harm: nothing."""
    yield from ()


def _group_problems(config: Config) -> Iterator[str]:
    heads, groups, t = (
        config.model.num_attention_heads,
        config.llama.num_query_groups,
        config.parallel.model_parallel_size,
    )
    if heads % groups:
        works = [n for n in range(1, heads + 1) if heads % n == 0]
        yield (
            f"--num-attention-heads must be a multiple of --num-query-groups, got {heads} and {groups}: each head of "
            f"keys serves as many query heads. Use one of {works} groups"
        )
    elif groups % t and heads % t == 0:
        works = [n for n in range(1, groups + 1) if groups % n == 0]
        yield (
            f"--num-query-groups must be a multiple of --model-parallel-size, got {groups} and {t}: a head of keys and "
            "values on several ranks would have to be computed on each of them, and its gradient summed over them. Use "
            f"--model-parallel-size with one of {works}, or more groups"
        )

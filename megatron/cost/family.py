"""From a configuration to the costs of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.cost.bert import BertCosts
from megatron.cost.costs import Costs
from megatron.cost.gpt2 import GPT2Costs
from megatron.cost.llama import LlamaCosts
from megatron.cost.memory import BYTES
from megatron.cost.mpt import MptCosts
from megatron.cost.t5 import T5Costs


def of(config: Any, *, is_on_cpu: bool = False) -> Costs:
    """Return the costs of the model of ``config``, a ``megatron.config.Config``, at the lengths of its samples.

    Args:
        is_on_cpu: where it is trained; what it keeps depends on that.

    Raises:
        ValueError: nothing is known of this family's costs.
    """
    if config.family not in COSTS:
        raise ValueError(f"the costs of these families are known: {', '.join(COSTS)}; got {config.family}")
    return COSTS[config.family](config, is_on_cpu)


def _of_gpt2(config: Any, is_on_cpu: bool) -> Costs:
    return GPT2Costs(
        config.model,
        config.batch.seq_length,
        is_on_cpu=is_on_cpu,
        is_blocked=is_on_cpu and not config.model.attention_dropout and not config.data.keeps_documents_apart,
        **_dropout(config, is_on_cpu),
    )


def _of_llama(config: Any, is_on_cpu: bool) -> Costs:
    return LlamaCosts(
        config.model,
        config.batch.seq_length,
        num_groups=config.llama.num_query_groups,
        is_on_cpu=is_on_cpu,
        **_dropout(config, is_on_cpu),
    )


def _of_t5(config: Any, is_on_cpu: bool) -> Costs:
    return T5Costs(
        config.model,
        config.t5,
        has_segments=config.t5.has_segments(config.data.reset_attention_mask),
        is_blocked=is_on_cpu and not config.model.attention_dropout,
        mask_bytes=_dropout(config, is_on_cpu)["mask_bytes"],
        is_on_cpu=is_on_cpu,
    )


def _of_mpt(config: Any, is_on_cpu: bool) -> Costs:
    return MptCosts(
        config.model,
        config.batch.seq_length,
        has_segments=config.data.keeps_documents_apart,
        mask_bytes=_dropout(config, is_on_cpu)["mask_bytes"],
        is_on_cpu=is_on_cpu,
    )


def _of_bert(config: Any, is_on_cpu: bool) -> Costs:
    return BertCosts(
        config.model, config.batch.seq_length, config.bert, is_on_cpu=is_on_cpu, **_dropout(config, is_on_cpu)
    )


def _dropout(config: Any, is_on_cpu: bool) -> dict[str, Any]:
    """Return what dropout makes of attention and of the masks.

    Attention that drops keeps its probabilities on a CPU, and where masks do not depend on the layout. A CPU keeps
    masks as numbers that it multiplies by.
    """
    model, dtype = config.model, config.precision.dtype or "fp32"
    return {
        "is_fused": not (model.attention_dropout and (is_on_cpu or model.layout_independent_dropout)),
        "mask_bytes": 0 if not model.hidden_dropout else BYTES.get(dtype, 4) if is_on_cpu else 1,
    }


COSTS: Mapping[str, Callable[[Any, bool], Costs]] = {
    "gpt2": _of_gpt2,
    "t5": _of_t5,
    "llama": _of_llama,
    "mpt": _of_mpt,
    "bert": _of_bert,
}
"""Family -> its costs, given a configuration and whether it trains on a CPU."""

"""From a configuration to the costs of its model."""

from __future__ import annotations

from typing import Any

from megatron.cost.costs import Costs
from megatron.cost.gpt2 import GPT2Costs
from megatron.cost.t5 import T5Costs


def of(config: Any, *, is_on_cpu: bool = False) -> Costs:
    """Return the costs of the model of ``config``, a ``megatron.config.Config``, at the lengths of its samples.

    Args:
        is_on_cpu: where it is trained; what it keeps depends on that.
    """
    if config.is_t5:
        return T5Costs(
            config.model,
            config.t5,
            has_segments=config.t5.has_segments(config.data.reset_attention_mask),
            is_blocked=is_on_cpu and not config.model.attention_dropout,
        )
    return GPT2Costs(config.model, config.batch.seq_length)

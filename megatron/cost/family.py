"""From a configuration to the costs of its model."""

from __future__ import annotations

from typing import Any

from megatron.cost.costs import Costs
from megatron.cost.gpt2 import GPT2Costs
from megatron.cost.t5 import T5Costs


def of(config: Any) -> Costs:
    """Return the costs of the model of ``config``, a ``megatron.config.Config``, at the lengths of its samples."""
    if config.is_t5:
        return T5Costs(config.model, config.t5, has_segments=config.t5.has_segments(config.data.reset_attention_mask))
    return GPT2Costs(config.model, config.batch.seq_length)

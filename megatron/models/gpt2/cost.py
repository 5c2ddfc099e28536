"""The costs of a GPT-2: those of a decoder as it is."""

from __future__ import annotations

from megatron.config import Config
from megatron.models.common.cost import Costs
from megatron.models.common.decoder_cost import GPT2Costs, dropout_costs


def costs(config: Config, is_on_cpu: bool = False) -> Costs:
    """Return the costs of the model of ``config``; what it keeps depends on where it is trained."""
    return GPT2Costs(
        config.model,
        config.batch.seq_length,
        is_on_cpu=is_on_cpu,
        is_blocked=is_on_cpu and not config.model.attention_dropout and not config.data.keeps_documents_apart,
        **dropout_costs(config, is_on_cpu),
    )

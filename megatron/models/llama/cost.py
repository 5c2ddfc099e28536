"""Costs of a LLaMA: a decoder's, without positions and shifts, and with fewer heads of keys and values than of queries.

| part | parameters | FLOPs of a token, forward |
|---|---|---|
| attention | 2 h (a + g) d | 4 h (a + g) d, and 2 s a d for the causal half of the scores |
| gated feed-forward | 3 h f | 6 h f |
| norms of a layer | 2 h | |

Turning queries and keys by their positions is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.models.common import decoder_cost
from megatron.models.common.decoder_cost import DecoderCosts, dropout_costs


@dataclass(frozen=True)
class LlamaCosts(DecoderCosts):
    """The costs of a LLaMA of ``sizes``; ``num_groups``: heads of keys and values."""

    norm_vectors: ClassVar[int] = 1
    has_positions: ClassVar[bool] = False
    num_groups: int = 0

    @property
    def keys(self) -> int:
        return (self.num_groups or self.sizes.num_attention_heads) * self.sizes.kv_hidden_size

    @property
    def attention_kept(self) -> int:
        """As of a GPT-2, and queries and keys before they are turned by their positions."""
        return super().attention_kept + decoder_cost.attention_width(self.sizes) + self.keys


def costs(config: Any, is_on_cpu: bool = False) -> LlamaCosts:
    """Return the costs of the model of ``config``, a ``Config``; what it keeps depends on where it is trained."""
    return LlamaCosts(
        config.model,
        config.batch.seq_length,
        num_groups=config.model.num_query_groups,
        is_on_cpu=is_on_cpu,
        **dropout_costs(config, is_on_cpu),
    )

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

from megatron.cost.gpt2 import GPT2Costs


@dataclass(frozen=True)
class LlamaCosts(GPT2Costs):
    """The costs of a LLaMA of ``sizes``; ``num_groups``: heads of keys and values."""

    num_groups: int = 0

    @property
    def keys(self) -> int:
        return (self.num_groups or self.sizes.num_attention_heads) * self.sizes.kv_hidden_size

    def flops_per_token(self, *, causal: bool = True) -> float:
        return super().flops_per_token(causal=causal) - 6.0 * self.sizes.hidden_size  # the shift of the last norm

    def layer_parameters(self, tensor: int = 1) -> int:
        return super().layer_parameters(tensor) - 2 * self.sizes.hidden_size

    def unit_parameters(self, tensor: int = 1) -> list[int]:
        embedding, *layers, _, head = super().unit_parameters(tensor)
        positions = self.sizes.max_position_embeddings * self.sizes.hidden_size
        return [embedding - positions, *layers, self.sizes.hidden_size, head]

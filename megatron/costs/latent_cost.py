"""Costs for multi-latent attention: parameters, products, saved activations and messages. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.costs.cost import Product

# Symbols: a heads, queries and keys with d = d_n + d_r elements, of which d_r are rotated, values with d_v elements,
# latents with r_kv and r_q elements (r_q = 0: queries are projected from the hidden state), p = max(d, d_v), t tensor
# ranks.
#
# | quantity | formula |
# |---|---|
# | parameters of the latents, on every rank | h (r_kv + d_r + r_q), and norms of r_kv + r_q elements |
# | parameters of the heads, sharded | a d (r_q or h) + a (d_n + d_v) r_kv + a d_v h, and a h of an output gate |
# | scores and weighted sums | 2 a (d + d_v) FLOPs per query and key |
# | saved elements per token, on every rank | the latents before and after their norms |
# | saved elements per token, sharded | queries, keys, values padded to p, the context; an output gate, gated context |
# | message over the context ranks | r_kv + d_r elements per token; the gathered latents are saved |
# | all-reduce over the tensor ranks in backward | r_kv + d_r + r_q elements per token; h without a query latent |
# | the same for an output gate | h elements per token |


@dataclass(frozen=True)
class LatentCosts:
    """Costs for one layer's multi-latent attention.

    Args:
        model: model sizes.
        num_norm_vectors: vectors per norm: a scale, and possibly a bias.
    """

    model: Any
    num_norm_vectors: int = 1

    @property
    def latent_size(self) -> int:
        """Elements per token that the context ranks exchange: its latent and its rotated key."""
        return int(self.model.kv_lora_rank + self.model.qk_pos_emb_head_dim)

    @property
    def entering_size(self) -> int:
        """Elements per token that enter the tensor-parallel region."""
        model = self.model
        gate_input = model.hidden_size if model.attention_output_gate else 0
        return int(self.latent_size + (model.q_lora_rank or model.hidden_size) + gate_input)

    def parameters(self, tensor: int = 1) -> int:
        """Count the parameters on one of ``tensor`` ranks, including the latents' norms."""
        model = self.model
        norms = self.num_norm_vectors * (model.kv_lora_rank + model.q_lora_rank)
        return sum(product.weights for product in self.products(1, 1, tensor)) + int(norms)

    def products(self, tokens: int, key_tokens: int, tensor: int) -> tuple[Product, ...]:
        """List the projections on one of ``tensor`` ranks.

        Args:
            tokens: tokens per micro-batch on the rank.
            key_tokens: tokens whose keys and values the rank projects: with context parallelism all tokens.
        """
        model, h, heads = self.model, self.model.hidden_size, self.model.num_attention_heads
        query_down = (Product(tokens, h, model.q_lora_rank, is_quantizable=True),) if model.q_lora_rank else ()
        gate = (Product(tokens, h, heads // tensor),) if model.attention_output_gate else ()
        return (
            *query_down,
            *gate,
            Product(tokens, model.q_lora_rank or h, heads * model.kv_hidden_size // tensor, is_quantizable=True),
            Product(tokens, h, self.latent_size, is_quantizable=True),
            Product(key_tokens, model.kv_lora_rank, heads * (model.qk_head_dim + model.v_head_dim) // tensor),
            Product(tokens, heads * model.v_head_dim // tensor, h, is_quantizable=True),
        )

    def saved_numel(
        self, tensor: int = 1, sequence: int = 1, context: int = 1, *, rebuilds_keys: bool = False
    ) -> float:
        """Count the elements that attention saves on one of ``tensor`` ranks, per token on the rank.

        Args:
            sequence: ranks over which the latents are sharded by token before the tensor-parallel region.
            context: ranks that shard the sequence.
            rebuilds_keys: keys and values are projected from the gathered latents again in backward.
        """
        model, heads = self.model, self.model.num_attention_heads / tensor
        padded, value = max(model.kv_hidden_size, model.v_head_dim), model.v_head_dim
        projected = padded if value < padded else model.qk_head_dim + value
        keys_and_values = 0 if rebuilds_keys else padded + projected
        output = value  # the input of the output projection
        if not rebuilds_keys and value < padded:
            output += padded  # the padded output, which the kernel saves
        if model.attention_output_gate:  # the sigmoid, and the context before it
            output += 1 + value
        projections = self.latent_size + model.q_lora_rank  # inputs of the norms
        entered = projections if tensor > 1 else model.kv_lora_rank + model.q_lora_rank
        if context > 1:  # the gathered latents of all tokens, instead of the rank's
            entered = model.q_lora_rank + context * self.latent_size
        return float(heads * (padded + keys_and_values + output) + projections / sequence + entered)

    def exchanged_numel(self, tensor: int) -> int:
        """Count the elements per token of the queries and of the output, on a tensor rank."""
        head_sizes = self.model.kv_hidden_size + self.model.v_head_dim
        return int(self.model.num_attention_heads * head_sizes // tensor)

    def rebuilt_numel(self, tensor: int) -> int:
        """Count elements per token in the padded keys and values for all heads on a tensor rank."""
        padded = max(self.model.kv_hidden_size, self.model.v_head_dim)
        return int(2 * self.model.num_attention_heads * padded // tensor)

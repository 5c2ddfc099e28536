"""ModelArgs: sizes and switches of a transformer layer."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from megatron.config.decoder import ROPE, DecoderFeatures, parse_factors
from megatron.ops.positions import Rotary

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class ModelArgs(DecoderFeatures):
    """Sizes and switches of a model, named like the flags. Lengths are in tokens, probabilities in 0 ... 1."""

    family: str = "gpt2"  # model family, a name in ``megatron.models.registry``
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    kv_hidden_size: int  # size of one head
    ff_hidden_size: int
    hidden_bias: bool = True
    layernorm_epsilon: float = 1e-5
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    activation: str = "gelu"
    untie_embeddings: bool = False
    make_vocab_size_divisible_by: int = 1
    apply_residual_connection_post_layernorm: bool = False
    checkpoint_activations: bool = False
    checkpoint_num_layers: int = 1
    recompute_attention: bool = False
    partition_activations: bool = False
    checkpoint_in_cpu: bool = False
    contiguous_checkpointing: bool = False
    forwards_in_flight: tuple[int, ...] = (1,)  # maximum number of micro-batches in flight, per stage
    z_loss: float = 0.0
    loss_average: str = "token"  # or "micro-batch": samples of a micro-batch share the weights of their MTP targets
    loss_chunk_tokens: int | None = 0  # 0: all logits at once; None: chosen by ``tokens_per_chunk``
    fp8_recipe: str = ""  # scales of products in FP8; "": no products in FP8
    num_layers_at_start_in_bf16: int = 0  # layers whose products are not in FP8
    num_layers_at_end_in_bf16: int = 0

    @property
    def attention_width(self) -> int:
        """Total width of all value heads: ``a d``."""
        return self.num_attention_heads * self.value_size

    def is_fp8_layer(self, layer: int) -> bool:
        """Return True if the products of layer ``layer`` are in FP8."""
        num_fp8_layers = self.num_layers - self.num_layers_at_end_in_bf16
        return bool(self.fp8_recipe) and self.num_layers_at_start_in_bf16 <= layer < num_fp8_layers

    @functools.cached_property
    def rotary(self) -> Rotary | None:
        """Rotary embedding shared by all layers, or None. A single object lets all layers share a compiled graph."""
        if self.position_embedding_type != ROPE:
            return None
        return Rotary(
            head_size=self.qk_pos_emb_head_dim if self.multi_latent_attention else self.kv_hidden_size,
            base=self.rotary_base,
            percent=self.rotary_percent,
            scaling=self.rotary_scaling,
            factor=self.rotary_scaling_factor,
            low_frequency_factor=self.rotary_low_frequency_factor,
            high_frequency_factor=self.rotary_high_frequency_factor,
            original_positions=self.rotary_original_positions,
            beta_fast=self.rotary_beta_fast,
            beta_slow=self.rotary_beta_slow,
            attention_factor=(
                self.latent_rotary_factor if self.multi_latent_attention else self.rotary_attention_factor
            ),
            short_factors=parse_factors(self.rotary_short_factors),
            long_factors=parse_factors(self.rotary_long_factors),
            is_truncated=self.rotary_truncate,
            is_interleaved=self.rotary_interleaved,
        )

    @functools.cached_property
    def local_rotary(self) -> Rotary | None:
        """Rotary embedding of layers with a window."""
        if self.rotary is None or not self.rotary_local_base:
            return self.rotary
        return replace(self.rotary, base=self.rotary_local_base, scaling="none")


def model_args_from(values: Any, **overrides: Any) -> ModelArgs:
    """Build ``ModelArgs`` from a configuration section or an object with the same attribute names."""
    return ModelArgs(**{**select_fields(ModelArgs, values), **overrides})


def select_fields(dataclass_type: Any, values: Any) -> dict[str, Any]:
    """Return the attributes of ``values`` that are fields of the dataclass ``dataclass_type``, by name."""
    return {name: getattr(values, name) for name in dataclass_type.__dataclass_fields__ if hasattr(values, name)}

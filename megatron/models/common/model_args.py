"""ModelArgs: sizes and switches of a transformer layer."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from megatron.config.decoder import ROPE, DecoderFeatures
from megatron.ops.positions import Rotary

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class ModelArgs(DecoderFeatures):
    """Sizes and switches; names as in the flags. Lengths are in tokens, probabilities in 0 ... 1."""

    family: str = "gpt2"  # whose they are: the name in ``megatron.models.registry``
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    kv_hidden_size: int  # of one head
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
    forwards_in_flight: tuple[int, ...] = (1,)  # of each stage, at most
    z_loss: float = 0.0
    loss_chunk_tokens: int | None = 0  # logits of all together; None: as ``megatron.config.model`` decides

    @property
    def attention_width(self) -> int:
        """Size of all heads together: ``a d``."""
        return self.num_attention_heads * self.kv_hidden_size

    @functools.cached_property
    def rotary(self) -> Rotary | None:
        """How the pairs of a head turn, if they do; one object, so that all layers have one compiled graph."""
        if self.position_embedding_type != ROPE:
            return None
        return Rotary(
            head_size=self.kv_hidden_size,
            base=self.rotary_base,
            percent=self.rotary_percent,
            scaling=self.rotary_scaling,
            factor=self.rotary_scaling_factor,
            low_frequency_factor=self.rotary_low_frequency_factor,
            high_frequency_factor=self.rotary_high_frequency_factor,
            original_positions=self.rotary_original_positions,
            beta_fast=self.rotary_beta_fast,
            beta_slow=self.rotary_beta_slow,
            attention_factor=self.rotary_attention_factor,
        )

    @functools.cached_property
    def local_rotary(self) -> Rotary | None:
        """The same of layers with a window."""
        if self.rotary is None or not self.rotary_local_base:
            return self.rotary
        return replace(self.rotary, base=self.rotary_local_base, scaling="none")


def model_args_from(values: Any, **overrides: Any) -> ModelArgs:
    """Return the sizes held by ``values`` (a configuration section or an object with the same names)."""
    return ModelArgs(**{**fields_held(ModelArgs, values), **overrides})


def fields_held(kind: Any, values: Any) -> dict[str, Any]:
    return {name: getattr(values, name) for name in kind.__dataclass_fields__ if hasattr(values, name)}

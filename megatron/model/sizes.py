"""The sizes and switches of a transformer: what a layer needs to know to build itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.random import DropoutStreams


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes and switches; names as in the flags. Lengths are in tokens, probabilities in 0 ... 1."""

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

    @property
    def attention_width(self) -> int:
        """Size of all heads together: ``a d``."""
        return self.num_attention_heads * self.kv_hidden_size


@dataclass(frozen=True)
class Place:
    """Where a module runs: its tensor-parallel group and its source of dropout masks."""

    group: Group = SINGLE
    streams: DropoutStreams = field(default_factory=DropoutStreams)


def sizes_from(values: Any, **overrides: Any) -> Sizes:
    """Return the sizes held by ``values`` (a configuration section or an object with the same names)."""
    names = [name for name in Sizes.__dataclass_fields__ if hasattr(values, name)]
    return Sizes(**{**{name: getattr(values, name) for name in names}, **overrides})

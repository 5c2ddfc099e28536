"""LlamaModel: GQA, RoPE, RMSNorm, SwiGLU."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.config import Config
from megatron.models.common.attention import Attention, LayerKVCache
from megatron.models.common.generation import Decoder, embed_words
from megatron.models.common.language_model import DecoderModel, WordEmbedding
from megatron.models.common.language_model import example_inputs as example_inputs
from megatron.models.common.model_args import ModelArgs, ParallelContext, fields_held
from megatron.models.common.parameters import Rule, gpt2_rule
from megatron.models.common.transformer import MLP, RMSNorm, run_layers
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, divide
from megatron.ops.attention import attention, document_mask
from megatron.ops.positions import Rotary, rotated, turns


@dataclass(frozen=True, kw_only=True)
class LlamaModelArgs(ModelArgs):
    """Sizes of a LLaMA: grouped-query attention and rotary positions."""

    family: str = "llama"
    hidden_bias: bool = False
    activation: str = "gated-silu"
    untie_embeddings: bool = True
    num_query_groups: int = 0  # heads of keys and values; 0: as many as query heads
    rotary_base: float = 10000.0
    rotary_scaling: str = "none"
    rotary_scaling_factor: float = 8.0
    rotary_low_frequency_factor: float = 1.0
    rotary_high_frequency_factor: float = 4.0
    rotary_original_positions: int = 8192

    @property
    def num_groups(self) -> int:
        """Heads of keys and values."""
        return self.num_query_groups or self.num_attention_heads

    @functools.cached_property
    def rotary(self) -> Rotary:
        """How the pairs of a head turn; one object, so that all layers have one compiled graph."""
        return Rotary(
            head_size=self.kv_hidden_size,
            base=self.rotary_base,
            scaling=self.rotary_scaling,
            factor=self.rotary_scaling_factor,
            low_frequency_factor=self.rotary_low_frequency_factor,
            high_frequency_factor=self.rotary_high_frequency_factor,
            original_positions=self.rotary_original_positions,
        )


def llama_model_args_from(model: Any, llama: Any, **overrides: Any) -> LlamaModelArgs:
    """Return the sizes held by the configuration sections ``model`` and ``llama``."""
    return LlamaModelArgs(**{**fields_held(LlamaModelArgs, model), **fields_held(LlamaModelArgs, llama), **overrides})


# LLaMA on one pipeline rank.


class GroupedQueryAttention(Attention):
    """Attention of a sequence to itself, with rotary positions and a head of keys and values for each group of queries.

    The weights of queries, keys and values are one matrix whose rows are ordered by group (the query heads of the first
    group, its key, its value, then the second group's), so that a contiguous cut gives each rank whole groups. Groups
    must so be a multiple of the ranks: a key that several ranks share would be computed on each of them, and its
    gradient would be a sum over them.

    Shapes:
        x         [s, b, h], or this rank's part of it, by ``place``
        mask      bool [b or 1, 1, s, s] or None for causal
        positions [b, s] or None for 0 ... s-1
        output    as x

    With a ``cache`` the keys and values of earlier passes count too, the mask is [b or 1, 1, s, s_k], and the cache
    tells the positions; it keeps keys as they were turned at theirs.

    Source: Su et al. 2021, "RoFormer"; Ainslie et al. 2023, "GQA".
    """

    def __init__(self, sizes: LlamaModelArgs, place: ParallelContext, layer: int) -> None:
        super().__init__(sizes, place, layer)
        if sizes.num_attention_heads % sizes.num_groups:
            raise ValueError(
                "--num-attention-heads must be a multiple of --num-query-groups, got "
                f"{sizes.num_attention_heads} and {sizes.num_groups}"
            )
        self.num_groups = divide("--num-query-groups", sizes.num_groups, place.group)
        self.rotary, self.longest = sizes.rotary, sizes.max_position_embeddings
        packed = (sizes.num_attention_heads + 2 * sizes.num_groups) * sizes.kv_hidden_size
        self.query_key_value = ColumnParallelLinear(sizes.hidden_size, packed, bias=sizes.hidden_bias, **place.cut)
        self.dense = RowParallelLinear(sizes.attention_width, sizes.hidden_size, bias=sizes.hidden_bias, **place.cut)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: LayerKVCache | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query, key, value = self.split_groups(self.query_key_value(x))  # [b, a/t, s, d], 2 x [b, g/t, s, d]
        longest = self.longest
        if cache is not None:
            positions, longest = cache.slots.positions, cache.slots.stop
        cosine, sine = turns(self.rotary, query, positions, longest)
        query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        if cache is not None:
            key, value = cache.extended(key, value)  # 2 x [b, g/t, s_k, d]
        context = self.attend(attention, query, key, value, mask=mask)  # [s, b, a d / t]
        return self.dense(context)

    def split_groups(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values.

        Shapes:
            packed [s, b, (a + 2 g) d / t]
            output [b, a/t, s, d], 2 x [b, g/t, s, d]
        """
        s, b, _ = packed.shape
        each = self.num_heads // self.num_groups
        groups = packed.view(s, b, self.num_groups, each + 2, self.head_size)  # [s, b, g/t, a/g + 2, d]
        query = groups[:, :, :, :each].flatten(2, 3)  # [s, b, a/t, d]
        key, value = groups[:, :, :, each], groups[:, :, :, each + 1]  # 2 x [s, b, g/t, d]
        return query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)


class LlamaLayer(nn.Module):
    """A pre-norm layer: ``x + dropout(attention(norm(x)))``, then ``x + dropout(mlp(norm(x)))``, with RMS norms.

    Shapes and arguments as of ``GroupedQueryAttention``.

    Args:
        layer: number of this layer in the whole model, from 0; part of the keys of its dropout masks.
    """

    def __init__(self, sizes: LlamaModelArgs, place: ParallelContext, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.hidden_dropout = sizes.hidden_dropout
        self.place = place
        self.input_norm = place.on_part(make_norm(sizes))
        self.attention = GroupedQueryAttention(sizes, place, layer)
        self.post_attention_norm = place.on_part(make_norm(sizes))
        self.mlp = MLP(sizes, place)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: LayerKVCache | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = x + self._dropout(self.attention(self.input_norm(x), mask, cache, positions), "attention output")
        return x + self._dropout(self.mlp(self.post_attention_norm(x)), "mlp output")

    def _dropout(self, x: torch.Tensor, site: str) -> torch.Tensor:
        return self.place.dropout(x, self.hidden_dropout, training=self.training, layer=self.layer, site=site)


def make_norm(sizes: LlamaModelArgs) -> RMSNorm:
    """Return a norm of LLaMA's."""
    return RMSNorm(sizes.hidden_size, sizes.layernorm_epsilon)


class LlamaModel(DecoderModel):
    """A decoder-only language model with rotary positions, cut over the tensor-parallel group of ``place``.

    Shapes:
        tokens [b, s]
        position_ids [b, s], each below ``max_position_embeddings`` or s; None: 0 ... s-1
        segment_ids [b, s] or None; given, attention stays within documents
        output logits [s, b, v/t]; with ``labels`` and ``loss_mask`` [b, s] the pair (loss sum, token count)

    Raises:
        ValueError: a position is not; looked for on a CPU alone, for another device would have to be waited for.

    Source: Touvron et al. 2023, "LLaMA: open and efficient foundation language models".
    """

    def __init__(self, sizes: LlamaModelArgs, place: ParallelContext | None = None) -> None:
        super().__init__(sizes, place, embedding=WordEmbedding, layer=LlamaLayer, norm=make_norm)

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        segment_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if position_ids is not None and position_ids.device.type == "cpu":
            self._check_positions(position_ids)
        mask = None if segment_ids is None else document_mask(segment_ids)
        x = self.embedding(tokens)  # [s, b, h]
        x = run_layers(list(self.layers), x, mask, None, position_ids, recompute=self.recompute)
        return self.finish(x, labels, loss_mask)

    def _check_positions(self, position_ids: torch.Tensor) -> None:
        lowest, highest = (int(each) for each in position_ids.aminmax())
        length = max(self.sizes.max_position_embeddings, position_ids.shape[-1])
        if lowest < 0 or highest >= length:
            raise ValueError(
                f"position_ids must be from 0 to {length - 1}, got {lowest} to {highest}. Give a model of more "
                "max_position_embeddings (--max-position-embeddings) or other positions"
            )


def model_args(config: Config, **switches: Any) -> LlamaModelArgs:
    """Return the sizes of the model of ``config``; ``switches``: further fields, or others in place of its own."""
    return llama_model_args_from(config.model, config.own, **switches)


def weight_init(config: Config) -> Rule:
    """Return how the initial weights scale."""
    return gpt2_rule(config.model.init_method_std, config.model.num_layers)


GENERATION = Decoder(embedding=WordEmbedding, embed=embed_words, layer=LlamaLayer, norm=make_norm)

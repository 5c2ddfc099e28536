"""MPT on one pipeline rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.config import Config
from megatron.model.alibi import AlibiBias
from megatron.model.decoder import DecoderModel
from megatron.model.embedding import WordEmbedding
from megatron.model.generation import Decoder, embed_words
from megatron.model.init import Rule, gpt2_rule
from megatron.model.layer import TransformerLayer
from megatron.model.norm import LayerNorm
from megatron.model.sizes import MptSizes, Place, mpt_sizes_from
from megatron.model.stack import run_layers
from megatron.mpu.layers import ColumnParallelLinear


def make_norm(sizes: MptSizes) -> LayerNorm:
    """Return a layer norm as MPT has it: it scales and does not shift."""
    return LayerNorm(sizes.hidden_size, sizes.layernorm_epsilon, bias=False)


class ClippedLinear(ColumnParallelLinear):
    """A product whose numbers are brought into ``-limit ... limit``.

    Source: MosaicML's MPT, ``clip_qkv``.
    """

    limit: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-self.limit, self.limit)


class MptLayer(TransformerLayer):
    """A layer whose norms do not shift. What its attention adds to the scores is the mask as well.

    Shapes:
        x      [s, b, h]
        bias   [1 or b, a/t, s, s], of ``AlibiBias``
        output [s, b, h]
    """

    def __init__(self, sizes: MptSizes, place: Place, layer: int) -> None:
        super().__init__(sizes, place, layer)
        self.input_norm = place.on_part(make_norm(sizes))
        self.post_attention_norm = place.on_part(make_norm(sizes))
        if sizes.clip_qkv:
            packed = ClippedLinear(sizes.hidden_size, 3 * sizes.attention_width, bias=False, **place.cut)
            packed.limit = sizes.clip_qkv
            self.attention.query_key_value = packed


class MptModel(DecoderModel):
    """A decoder-only language model with ALiBi and without biases, cut over the tensor-parallel group of ``place``.

    There is no table of positions: a sequence may be longer than ``max_position_embeddings``.

    Shapes:
        tokens [b, s]
        segment_ids [b, s] or None; given, attention stays within documents
        output logits [s, b, v/t]; with ``labels`` and ``loss_mask`` [b, s] the pair (loss sum, token count)

    Source: MosaicML 2023, "Introducing MPT-7B"; Press et al. 2022, "Train short, test long".
    """

    def __init__(self, sizes: MptSizes, place: Place | None = None) -> None:
        super().__init__(sizes, place, embedding=WordEmbedding, layer=MptLayer, norm=make_norm)
        self.alibi = AlibiBias(sizes, self.place)

    def forward(
        self,
        tokens: torch.Tensor,
        segment_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(tokens)  # [s, b, h]
        bias = self.alibi.for_hidden(x, segment_ids)
        x = run_layers(list(self.layers), x, bias, recompute=self.recompute)
        return self.finish(x, labels, loss_mask)


def model_args(config: Config, **switches: Any) -> MptSizes:
    """Return the sizes of the model of ``config``; ``switches``: further fields, or others in place of its own."""
    return mpt_sizes_from(config.model, config.own, **switches)


def weight_init(config: Config) -> Rule:
    """Return how the initial weights scale."""
    return gpt2_rule(config.model.init_method_std, config.model.num_layers)


def example_inputs(config: Config, words: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what it takes beside its labels; ``words(length)`` makes tokens [b, length]."""
    return {"tokens": words(config.batch.seq_length)}


GENERATION = Decoder(
    embedding=WordEmbedding,
    embed=embed_words,
    layer=MptLayer,
    norm=make_norm,
    mask=lambda sizes, place: AlibiBias(sizes, place).for_slots,
    has_end=False,
)

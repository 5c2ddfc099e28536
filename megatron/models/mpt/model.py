"""MptModel: ALiBi, no biases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron.config import Config
from megatron.models.common.attention import KVCacheSlots, LastValueCache
from megatron.models.common.generation import Decoder, embed_words
from megatron.models.common.language_model import DecoderModel, WordEmbedding
from megatron.models.common.model_args import ModelArgs, ParallelContext, fields_held
from megatron.models.common.parameters import Rule, gpt2_rule
from megatron.models.common.transformer import LayerNorm, TransformerLayer, run_layers
from megatron.mpu.layers import ColumnParallelLinear, divide
from megatron.ops.positions import alibi_bias, alibi_slopes, within_documents


@dataclass(frozen=True, kw_only=True)
class MptModelArgs(ModelArgs):
    """Sizes of an MPT: no biases, no table of positions."""

    family: str = "mpt"
    hidden_bias: bool = False
    alibi_bias_max: float = 8.0
    clip_qkv: float = 0.0  # queries, keys and values are brought into -clip_qkv ... clip_qkv; 0: they are not


def mpt_model_args_from(model: Any, mpt: Any, **overrides: Any) -> MptModelArgs:
    """Return the sizes held by the configuration sections ``model`` and ``mpt``."""
    return MptModelArgs(**{**fields_held(MptModelArgs, model), **fields_held(MptModelArgs, mpt), **overrides})


# The ALiBi biases of one rank, made once for all layers that share them.


class AlibiBias:
    """The biases of this rank's heads, for the layers of a stage: the heads of tensor rank r begin at r a / t.

    It keeps the causal bias of one sequence length, and the one within documents of one micro-batch: so all layers of
    a forward add the same tensor, which also is in memory once for their backward. No rank sends any of it.

    Shapes:
        biases [1 or b, a/t, s, s_k]
    """

    def __init__(self, sizes: MptModelArgs, place: ParallelContext) -> None:
        self._place = place
        heads = divide("--num-attention-heads", sizes.num_attention_heads, place.group)
        first = place.group.rank * heads
        self.slopes = alibi_slopes(sizes.num_attention_heads, sizes.alibi_bias_max)[first : first + heads]
        self._causal: torch.Tensor | None = None
        self._within, self._pass = LastValueCache(), LastValueCache()

    @torch.compiler.disable  # what is kept from one call to the next is no part of a graph
    def for_hidden(self, x: torch.Tensor, segment_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return what the layers add that read ``x`` [s, b, h]; with ``segment_ids`` [b, s] documents are apart."""
        causal, length = self._causal, self._place.length(x)
        if causal is None or (causal.shape[-1], causal.dtype, causal.device) != (length, x.dtype, x.device):
            positions = torch.arange(length, device=x.device)
            causal = self._causal = self._make(positions.unsqueeze(0), positions, x.dtype)
            self._within.forget()
        if segment_ids is None:
            return causal
        return self._within.of(segment_ids, partial(within_documents, causal, segment_ids))

    def for_slots(self, slots: KVCacheSlots, dtype: torch.dtype) -> torch.Tensor:
        """Return the bias of a pass that reads from the caches, whose queries stand at ``slots.positions``."""
        assert slots.positions is not None
        positions = slots.positions if slots.mask is not None else slots.positions[:1]  # in a first pass rows are alike
        keys = torch.arange(slots.stop, device=positions.device)
        return self._pass.of(slots.positions, partial(self._make, positions, keys, dtype))

    def _make(self, queries: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        slopes = torch.tensor(self.slopes, dtype=torch.float64, device=keys.device)
        return alibi_bias(slopes, queries, keys, dtype)


# MPT on one pipeline rank.


def make_norm(sizes: MptModelArgs) -> LayerNorm:
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

    def __init__(self, sizes: MptModelArgs, place: ParallelContext, layer: int) -> None:
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

    def __init__(self, sizes: MptModelArgs, place: ParallelContext | None = None) -> None:
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


def model_args(config: Config, **switches: Any) -> MptModelArgs:
    """Return the sizes of the model of ``config``; ``switches``: further fields, or others in place of its own."""
    return mpt_model_args_from(config.model, config.own, **switches)


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

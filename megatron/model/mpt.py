"""MPT on one pipeline rank."""

from __future__ import annotations

import torch
from torch import nn

from megatron.model.alibi import AlibiBias
from megatron.model.embedding import WordEmbedding
from megatron.model.head import Head, logits_of
from megatron.model.layer import TransformerLayer
from megatron.model.loss import model_loss
from megatron.model.norm import LayerNorm
from megatron.model.recompute import Recompute
from megatron.model.sizes import MptSizes, Place
from megatron.model.stack import run_layers
from megatron.mpu.layers import ColumnParallelLinear

mpt_loss = model_loss


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
        self.input_norm, self.post_attention_norm = make_norm(sizes), make_norm(sizes)
        if sizes.clip_qkv:
            packed = ClippedLinear(sizes.hidden_size, 3 * sizes.attention_width, bias=False, group=place.group)
            packed.limit = sizes.clip_qkv
            self.attention.query_key_value = packed


class MptModel(nn.Module):
    """A decoder-only language model with ALiBi and without biases, cut over the tensor-parallel group of ``place``.

    There is no table of positions: a sequence may be longer than ``max_position_embeddings``.

    Shapes:
        tokens [b, s]
        segment_ids [b, s] or None; given, attention stays within documents
        output logits [s, b, v/t]; with ``labels`` and ``loss_mask`` [b, s] the pair (loss sum, token count)

    Source: MosaicML 2023, "Introducing MPT-7B"; Press et al. 2022, "Train short, test long".
    """

    loss_weighting = "tokens"  # for the start table

    def __init__(self, sizes: MptSizes, place: Place | None = None) -> None:
        super().__init__()
        self.sizes = sizes
        self.place = place or Place()
        self.recompute = Recompute(sizes, self.place)
        self.alibi = AlibiBias(sizes, self.place)
        self.embedding = WordEmbedding(sizes, self.place)
        self.layers = nn.ModuleList(MptLayer(sizes, self.place, i) for i in range(sizes.num_layers))
        self.final_norm = make_norm(sizes)
        self.head = Head(sizes, self.place) if sizes.untie_embeddings else None

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
        logits = self._logits(self.final_norm(x))  # [s, b, v/t]
        if labels is None or loss_mask is None:
            return logits
        return mpt_loss(logits, labels, loss_mask, self.sizes, self.place)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.head is not None:
            return self.head(x)
        return logits_of(x, self.embedding.word.weight, self.place.group)

"""GPT-2 on one pipeline rank."""

from __future__ import annotations

import torch
from torch import nn

from megatron.model.embedding import Embedding
from megatron.model.head import Head, logits_of
from megatron.model.layer import TransformerLayer
from megatron.model.loss import model_loss
from megatron.model.norm import LayerNorm
from megatron.model.recompute import Recompute
from megatron.model.sizes import Place, Sizes
from megatron.model.stack import run_layers
from megatron.ops.attention import document_mask

gpt2_loss = model_loss


class GPT2Model(nn.Module):
    """A decoder-only language model with learned positions, cut over the tensor-parallel group of ``place``.

    Shapes:
        tokens, position_ids [b, s]
        segment_ids [b, s] or None; given, attention stays within documents
        output logits [s, b, v/t]; with ``labels`` and ``loss_mask`` [b, s] the pair (loss sum, token count)

    Source: Radford et al. 2019, "Language models are unsupervised multitask learners".
    """

    loss_weighting = "tokens"  # for the start table

    def __init__(self, sizes: Sizes, place: Place | None = None) -> None:
        super().__init__()
        self.sizes = sizes
        self.place = place or Place()
        self.recompute = Recompute(sizes, self.place)
        self.embedding = Embedding(sizes, self.place)
        self.layers = nn.ModuleList(TransformerLayer(sizes, self.place, i) for i in range(sizes.num_layers))
        self.final_norm = LayerNorm(sizes.hidden_size, sizes.layernorm_epsilon)
        self.head = Head(sizes, self.place) if sizes.untie_embeddings else None

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        segment_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        mask = None if segment_ids is None else document_mask(segment_ids)
        x = self.embedding(tokens, position_ids)  # [s, b, h]
        x = run_layers(list(self.layers), x, mask, recompute=self.recompute)
        logits = self._logits(self.final_norm(x))  # [s, b, v/t]
        if labels is None or loss_mask is None:
            return logits
        return gpt2_loss(logits, labels, loss_mask, self.sizes, self.place)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.head is not None:
            return self.head(x)
        return logits_of(x, self.embedding.word.weight, self.place.group)

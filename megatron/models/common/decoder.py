"""The plain decoder on one pipeline rank: GPT-2, and each family of decoders that has no model of its own."""

from __future__ import annotations

from typing import Any

import torch

from megatron.config import Config
from megatron.models.common.generation import Decoder, layer_norm
from megatron.models.common.language_model import DecoderModel, Embedding
from megatron.models.common.language_model import example_inputs as example_inputs
from megatron.models.common.model_args import ModelArgs, ParallelContext, model_args_from
from megatron.models.common.parameters import Rule, gpt2_rule
from megatron.models.common.transformer import TransformerLayer, run_layers
from megatron.ops.attention import document_mask


class GPT2Model(DecoderModel):
    """A decoder-only language model with learned positions, cut over the tensor-parallel group of ``place``.

    Shapes:
        tokens, position_ids [b, s]
        segment_ids [b, s] or None; given, attention stays within documents
        output logits [s, b, v/t]; with ``labels`` and ``loss_mask`` [b, s] the pair (loss sum, token count)

    Source: Radford et al. 2019, "Language models are unsupervised multitask learners".
    """

    def __init__(self, sizes: ModelArgs, place: ParallelContext | None = None) -> None:
        super().__init__(sizes, place, embedding=Embedding, layer=TransformerLayer, norm=layer_norm)

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
        return self.finish(x, labels, loss_mask)


def model_args(config: Config, **switches: Any) -> ModelArgs:
    """Return the sizes of the model of ``config``; ``switches``: further fields, or others in place of its own."""
    return model_args_from(config.model, **{"family": config.family, **switches})


def weight_init(config: Config) -> Rule:
    """Return how the initial weights scale."""
    return gpt2_rule(config.model.init_method_std, config.model.num_layers)


GENERATION = Decoder(embedding=Embedding, embed=Embedding.forward, layer=TransformerLayer)

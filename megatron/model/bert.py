"""BERT on one pipeline rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron.config import Config
from megatron.model.bert_head import NextSentence, Transform, WordHead
from megatron.model.bert_layer import BertEmbedding, BertLayer, padding_mask
from megatron.model.bert_loss import Outputs, Pair, bert_loss, whole_outputs
from megatron.model.init import Rule, bert_rule
from megatron.model.recompute import Recompute
from megatron.model.sizes import BertSizes, Place, bert_sizes_from
from megatron.model.stack import run_layers


class BertModel(nn.Module):
    """An encoder that finds masked words and, with ``binary_head``, tells whether two segments belong together.

    Shapes:
        tokens, token_types [b, s]
        segments [b, s] or None; given, -1 is padding, which no other token sees
        output logits [s, b, v/t], with ``binary_head`` also [b, 2]; with ``labels`` and the rest of what
            ``bert_loss`` takes its losses

    Source: Devlin et al. 2019, "BERT: Pre-training of deep bidirectional transformers for language understanding".
    """

    loss_weighting = "tokens"  # for the start table

    def __init__(self, sizes: BertSizes, place: Place | None = None) -> None:
        super().__init__()
        self.sizes = sizes
        self.place = place or Place()
        self.recompute = Recompute(sizes, self.place)
        self.embedding = BertEmbedding(sizes, self.place)
        self.layers = nn.ModuleList(BertLayer(sizes, self.place, i) for i in range(sizes.num_layers))
        self.transform = Transform(sizes, self.place)
        self.next_sentence = NextSentence(sizes, self.place) if sizes.binary_head else None
        self.head = WordHead(sizes, self.place)

    def forward(
        self,
        tokens: torch.Tensor,
        token_types: torch.Tensor,
        segments: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
        is_random: torch.Tensor | None = None,
        step_predictions: torch.Tensor | None = None,
    ) -> Outputs | Pair | dict[str, Pair]:
        x = self.embedding(tokens, token_types)  # [s, b, h]
        mask = None if segments is None else padding_mask(segments)
        x = run_layers(list(self.layers), x, mask, recompute=self.recompute)
        words = self.head(self.transform(x), self.embedding.word.weight)  # [s, b, v/t]
        logits = words if self.next_sentence is None else (words, self.next_sentence(x))
        if labels is None or loss_mask is None:
            return whole_outputs(logits)
        return bert_loss(logits, labels, loss_mask, is_random, step_predictions, sizes=self.sizes, place=self.place)


def model_args(config: Config, **switches: Any) -> BertSizes:
    """Return the sizes of the model of ``config``; ``switches``: further fields, or others in place of its own."""
    return bert_sizes_from(config.model, config.own, **switches)


def weight_init(config: Config) -> Rule:
    """Return how the initial weights scale."""
    return bert_rule(config.model.init_method_std)


def example_inputs(config: Config, words: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what it takes beside its labels; ``words(length)`` makes tokens [b, length]."""
    tokens = words(config.batch.seq_length)
    nothing = torch.zeros_like(tokens)
    inputs = {"tokens": tokens, "token_types": nothing, "is_random": nothing[:, 0]}
    return inputs | ({"segments": nothing.int()} if config.own.short_seq_prob > 0 else {})  # samples are padded

"""What enters and leaves the two sides of T5: embedding, norms, head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.embedding import PositionEmbedding
from megatron.model.head import Logits, head_output
from megatron.model.norm import LayerNorm, RMSNorm
from megatron.model.sizes import Place, T5Sizes
from megatron.mpu.layers import VocabParallelEmbedding
from megatron.ops.positions import positions_in_segments


class T5Embedding(nn.Module):
    """Word embedding, and learned positions in the variant that has them, with dropout. Both sides share the tables.

    Shapes:
        tokens, segments [b, s]
        output [s, b, h], or this rank's part of it, by ``place``

    ``side``, "encoder" or "decoder", says whose dropout masks to draw.
    """

    def __init__(self, sizes: T5Sizes, place: Place) -> None:
        super().__init__()
        self.sizes, self.place = sizes, place
        self.word = VocabParallelEmbedding(
            sizes.vocab_size, sizes.hidden_size, divisible_by=sizes.make_vocab_size_divisible_by, **place.cut
        )
        size = (sizes.max_position_embeddings, sizes.hidden_size)
        self.position = None if sizes.is_relative else place.on_part(PositionEmbedding(*size))

    def forward(
        self,
        tokens: torch.Tensor,
        segments: torch.Tensor | None = None,
        *,
        side: str,
        table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return embed(
            tokens,
            self.word,
            self.position,
            sizes=self.sizes,
            place=self.place,
            side=side,
            training=self.training,
            segments=segments,
            table=table,
        )


def embed(
    tokens: torch.Tensor,
    word: VocabParallelEmbedding,
    position: PositionEmbedding | None,
    *,
    sizes: T5Sizes,
    place: Place,
    side: str,
    training: bool,
    segments: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the hidden states that enter ``side``; learned positions start anew in each segment.

    Shapes:
        tokens, segments [b, s]
        output [s, b, h], or this rank's part of it, by ``place``

    Args:
        table: all of the word table, from ``shared_table``, to look up rows in instead of asking ``word``.
    """
    x = word(tokens.t()) if table is None else F.embedding(tokens.t(), table, sparse=True)  # [s, b, h]
    if position is not None:
        if segments is None:
            x = x + position(place.part(torch.arange(tokens.shape[1], device=tokens.device))).unsqueeze(1)
        else:
            x = x + position(place.part(positions_in_segments(segments).t()))
    return place.dropout(x, sizes.hidden_dropout, training=training, layer=-1, site=f"{side} embedding")


def make_norm(sizes: T5Sizes, place: Place) -> nn.Module:
    """Return a norm as a layer of this variant has it."""
    kind = RMSNorm if sizes.is_relative else LayerNorm
    return place.on_part(kind(sizes.hidden_size, sizes.layernorm_epsilon))


def make_final_norm(sizes: T5Sizes, place: Place, side: str) -> nn.Module:
    """Return the norm at the end of ``side``; with relative positions dropout follows it."""
    return FinalRMSNorm(sizes, place, side) if sizes.is_relative else make_norm(sizes, place)


class FinalRMSNorm(RMSNorm):
    """The norm at the end of a side, and its dropout.

    Shapes:
        input, output [s, b, h]
    """

    def __init__(self, sizes: T5Sizes, place: Place, side: str) -> None:
        super().__init__(sizes.hidden_size, sizes.layernorm_epsilon)
        self.dropout, self.place, self.side = sizes.hidden_dropout, place, side
        place.on_part(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.place.dropout(
            super().forward(x), self.dropout, training=self.training, layer=-1, site=f"{self.side} final norm"
        )


def tied_logits(x: torch.Tensor, weight: torch.Tensor, sizes: T5Sizes, place: Place) -> Logits:
    """Return the logits of a head that is the word table; with relative positions ``x`` is scaled by ``h ** -0.5``.

    Shapes:
        x      [s, b, h], or this rank's part of it, by ``place``
        weight [v/t, h]
        output [s, b, v/t], or what they are made of

    Source: Raffel et al.'s code, for weights of variance 1; the papers do not tell.
    """
    if sizes.is_relative:
        x = x * sizes.hidden_size**-0.5
    return head_output(x, weight, sizes, place)

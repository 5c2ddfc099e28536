"""Word and position embedding, and words alone."""

from __future__ import annotations

import torch
from torch import nn

from megatron.model.sizes import Place, Sizes
from megatron.mpu.layers import VocabParallelEmbedding
from megatron.mpu.shard import Shard, empty_weight


class PositionEmbedding(nn.Module):
    """A learned vector for each position. Every rank holds all of it.

    Shapes:
        input  [b, s] positions below ``max_position_embeddings``
        output [b, s, h]
    """

    def __init__(self, max_position_embeddings: int, hidden_size: int) -> None:
        super().__init__()
        shape = (max_position_embeddings, hidden_size)
        self.weight = empty_weight(shape, Shard(shape))

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(position_ids, self.weight)


class Embedding(nn.Module):
    """The sum of word and position embedding, with dropout.

    Shapes:
        tokens, position_ids [b, s]
        output [s, b, h], or this rank's part of it, by ``place``
    """

    def __init__(self, sizes: Sizes, place: Place) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(
            sizes.vocab_size, sizes.hidden_size, divisible_by=sizes.make_vocab_size_divisible_by, **place.cut
        )
        self.position = place.on_part(PositionEmbedding(sizes.max_position_embeddings, sizes.hidden_size))
        self.hidden_dropout = sizes.hidden_dropout
        self.place = place

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if self.place.sequence_parallel:
            x = self.word(tokens.t()) + self.position(self.place.part(position_ids.t()))  # [s/t, b, h]
        else:
            x = self.word(tokens) + self.position(position_ids)  # [b, s, h]
            x = x.transpose(0, 1).contiguous()  # [s, b, h]
        return self.place.dropout(x, self.hidden_dropout, training=self.training, layer=-1, site="embedding")


class WordEmbedding(nn.Module):
    """The embedding of words, with dropout, for models whose positions are in their attention.

    Shapes:
        tokens [b, s]
        output [s, b, h], or this rank's part of it, by ``place``
    """

    def __init__(self, sizes: Sizes, place: Place) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(
            sizes.vocab_size, sizes.hidden_size, divisible_by=sizes.make_vocab_size_divisible_by, **place.cut
        )
        self.hidden_dropout = sizes.hidden_dropout
        self.place = place

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.place.sequence_parallel:
            x = self.word(tokens.t())  # [s/t, b, h]
        else:
            x = self.word(tokens).transpose(0, 1).contiguous()  # [s, b, h]
        return self.place.dropout(x, self.hidden_dropout, training=self.training, layer=-1, site="embedding")

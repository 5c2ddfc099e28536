"""The layers of BERT's encoder, and what comes before them."""

from __future__ import annotations

import torch
from torch import nn

from megatron.model.attention import SelfAttention
from megatron.model.embedding import PositionEmbedding
from megatron.model.mlp import MLP
from megatron.model.norm import LayerNorm
from megatron.model.sizes import BertSizes, Place
from megatron.mpu.layers import VocabParallelEmbedding
from megatron.ops.attention import attention, segment_mask


class AroundWords(nn.Module):
    """What joins the words: positions, token types, norm and dropout.

    Shapes:
        words [s, b, h], or this rank's part of it, by ``place``
        token_types [b, s]
        output as words
    """

    def __init__(self, sizes: BertSizes, place: Place) -> None:
        super().__init__()
        self.position = place.on_part(PositionEmbedding(sizes.max_position_embeddings, sizes.hidden_size))
        self.token_type = place.on_part(PositionEmbedding(sizes.num_token_types, sizes.hidden_size))
        self.norm = place.on_part(LayerNorm(sizes.hidden_size, sizes.layernorm_epsilon))
        self.hidden_dropout = sizes.hidden_dropout
        self.place = place

    def forward(self, words: torch.Tensor, token_types: torch.Tensor) -> torch.Tensor:
        types = self.place.part(token_types.t())  # [s, b] or [s/t, b]
        positions = self.place.part(torch.arange(token_types.shape[1], device=words.device))
        x = words + self.position(positions).unsqueeze(1) + self.token_type(types)
        return self.place.dropout(self.norm(x), self.hidden_dropout, training=self.training, layer=-1, site="embedding")


class BertEmbedding(AroundWords):
    """The sum of word, position and token type, with norm and dropout.

    Shapes:
        tokens [b, s]
        token_types [b, s], 0 in the first segment of a sample, 1 in the second
        output [s, b, h]
    """

    def __init__(self, sizes: BertSizes, place: Place) -> None:
        super().__init__(sizes, place)
        self.word = VocabParallelEmbedding(
            sizes.vocab_size, sizes.hidden_size, divisible_by=sizes.make_vocab_size_divisible_by, **place.cut
        )

    def forward(self, tokens: torch.Tensor, token_types: torch.Tensor) -> torch.Tensor:
        return super().forward(self.word(tokens.t()), token_types)


class BertAttention(SelfAttention):
    """Self-attention in both directions.

    Shapes:
        x      [s, b, h]
        mask   bool [b, 1, s, s], True where a query may look, or None
        output [s, b, h]
    """

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        query, key, value = self.split_heads(self.query_key_value(x), 3)  # 3 x [b, a/t, s, d]
        return self.dense(self.attend(attention, query, key, value, mask=mask, is_causal=False))


def padding_mask(segments: torch.Tensor) -> torch.Tensor:
    """Return where a query may look: bool [b, 1, s, s] of segments [b, s], -1 in padding, which no other token sees."""
    return segment_mask(segments, segments)


class BertLayer(nn.Module):
    """A post-norm layer: ``norm(x + dropout(attention(x)))``, then ``norm(x + dropout(mlp(x)))``.

    Shapes:
        x        [s, b, h]
        mask     of ``padding_mask``, or None
        output   [s, b, h]

    Args:
        layer: number of this layer in the whole model, from 0; part of the keys of its dropout masks.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.1; Devlin et al. 2019, "BERT".
    """

    def __init__(self, sizes: BertSizes, place: Place, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.hidden_dropout = sizes.hidden_dropout
        self.place = place
        self.attention = BertAttention(sizes, place, layer)
        self.post_attention_norm = place.on_part(LayerNorm(sizes.hidden_size, sizes.layernorm_epsilon))
        self.mlp = MLP(sizes, place, layer)
        self.post_mlp_norm = place.on_part(LayerNorm(sizes.hidden_size, sizes.layernorm_epsilon))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.post_attention_norm(x + self._dropout(self.attention(x, mask), "attention output"))
        return self.post_mlp_norm(x + self._dropout(self.mlp(x), "mlp output"))

    def _dropout(self, x: torch.Tensor, site: str) -> torch.Tensor:
        return self.place.dropout(x, self.hidden_dropout, training=self.training, layer=self.layer, site=site)

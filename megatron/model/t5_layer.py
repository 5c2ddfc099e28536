"""One layer of T5's encoder and one of its decoder."""

from __future__ import annotations

import torch
from torch import nn

from megatron.model.cache import LayerCache
from megatron.model.mlp import MLP
from megatron.model.sizes import Place, T5Sizes
from megatron.model.t5_attention import CrossAttention, RelativeBias, T5SelfAttention
from megatron.model.t5_embedding import make_norm
from megatron.ops.attention import document_mask, segment_mask


class T5Layer(nn.Module):
    """What layers of both sides share: pre-norm parts ``x + dropout(part(norm(x)))``, feed-forward last.

    With relative positions there is dropout after the activation as well.

    Args:
        layer: number of this layer in the whole model, encoder first; part of the keys of its dropout masks.
    """

    def __init__(self, sizes: T5Sizes, place: Place, layer: int, *, is_causal: bool) -> None:
        super().__init__()
        self.layer = layer
        self.hidden_dropout = sizes.hidden_dropout
        self.place = place
        self.input_norm = make_norm(sizes, place)
        self.attention = T5SelfAttention(sizes, place, layer, is_causal=is_causal)
        self.post_attention_norm = make_norm(sizes, place)
        self.mlp = MLP(sizes, place, layer, dropout=sizes.hidden_dropout if sizes.is_relative else 0.0)

    def self_attended(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        table: RelativeBias | None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        """Return ``x`` and what it reads from itself."""
        return x + self.dropped(self.attention(self.input_norm(x), mask, table, cache), "attention output")

    def fed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` and what the feed-forward part makes of it."""
        return x + self.dropped(self.mlp(self.post_attention_norm(x)), "mlp output")

    def dropped(self, x: torch.Tensor, site: str) -> torch.Tensor:
        """Return what joins the residual stream of ``x``."""
        return self.place.dropout(x, self.hidden_dropout, training=self.training, layer=self.layer, site=site)


class T5EncoderLayer(T5Layer):
    """Self-attention in both directions, feed-forward.

    Shapes:
        x        [s_e, b, h], or this rank's part of it, by ``place``
        segments [b, s_e] the document of each position, -1 for padding; given, attention stays within documents
        output   as x
    """

    def __init__(self, sizes: T5Sizes, place: Place, layer: int) -> None:
        super().__init__(sizes, place, layer, is_causal=False)

    def forward(
        self, x: torch.Tensor, table: RelativeBias | None = None, segments: torch.Tensor | None = None
    ) -> torch.Tensor:
        mask = None if segments is None else segment_mask(segments, segments)
        return self.fed_forward(self.self_attended(x, mask, table))


class T5DecoderLayer(T5Layer):
    """Causal self-attention, attention to the encoder's output, feed-forward.

    Shapes:
        x      [s_d, b, h], or this rank's part of it, by ``place``
        memory [s_e, b, h]
        enc_segments [b, s_e], dec_segments [b, s_d]: both or none; a document reads its own part of ``memory``
        output as x

    With a ``cache``, as ``SelfAttention`` and ``CrossAttention`` take it, the rows of the decoder hold one document.
    """

    def __init__(self, sizes: T5Sizes, place: Place, layer: int) -> None:
        super().__init__(sizes, place, layer, is_causal=True)
        self.shares: tuple[int, ...] = (1,) if place.sequence_parallel else ()  # memory's gradient, for the debugger
        self.cross_norm = make_norm(sizes, place)
        self.cross_attention = CrossAttention(sizes, place, layer)

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor | None,
        table: RelativeBias | None = None,
        enc_segments: torch.Tensor | None = None,
        dec_segments: torch.Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        own, cross = None, None
        if enc_segments is not None and dec_segments is not None:
            own, cross = document_mask(dec_segments), segment_mask(dec_segments, enc_segments)
        if cache is not None:
            own = cache.slots.mask
        x = self.self_attended(x, own, table, cache)
        x = x + self.dropped(self.cross_attention(self.cross_norm(x), memory, cross, cache), "cross attention output")
        return self.fed_forward(x)

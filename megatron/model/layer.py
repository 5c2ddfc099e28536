"""One transformer layer: attention and feed-forward, each with norm, dropout and residual."""

from __future__ import annotations

import torch
from torch import nn

from megatron.model.attention import SelfAttention
from megatron.model.cache import LayerCache
from megatron.model.mlp import MLP
from megatron.model.norm import LayerNorm
from megatron.model.sizes import Place, Sizes


class TransformerLayer(nn.Module):
    """A pre-norm layer: ``x + dropout(attention(norm(x)))``, then ``x + dropout(mlp(norm(x)))``.

    With ``--apply-residual-connection-post-layernorm`` the residual is the normalised input.

    Shapes:
        x      [s, b, h], or this rank's part of it, by ``place``
        mask   bool [b or 1, 1, s, s] or None for causal
        output as x

    ``cache`` as in ``SelfAttention``.

    Args:
        layer: number of this layer in the whole model, from 0; part of the keys of its dropout masks.
    """

    def __init__(self, sizes: Sizes, place: Place, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.hidden_dropout = sizes.hidden_dropout
        self.is_residual_normed = sizes.apply_residual_connection_post_layernorm
        self.place = place
        self.input_norm = place.on_part(LayerNorm(sizes.hidden_size, sizes.layernorm_epsilon))
        self.attention = SelfAttention(sizes, place, layer)
        self.post_attention_norm = place.on_part(LayerNorm(sizes.hidden_size, sizes.layernorm_epsilon))
        self.mlp = MLP(sizes, place)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, cache: LayerCache | None = None
    ) -> torch.Tensor:
        normed = self.input_norm(x)
        x = self._residual(x, normed) + self._dropout(self.attention(normed, mask, cache), "attention output")
        normed = self.post_attention_norm(x)
        return self._residual(x, normed) + self._dropout(self.mlp(normed), "mlp output")

    def _residual(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return normed if self.is_residual_normed else x

    def _dropout(self, x: torch.Tensor, site: str) -> torch.Tensor:
        return self.place.dropout(x, self.hidden_dropout, training=self.training, layer=self.layer, site=site)

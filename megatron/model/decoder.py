"""What decoders on one pipeline rank have in common: embedding, layers, last norm, head and loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron.config import Config
from megatron.model.head import Head, Logits, head_output, whole_logits
from megatron.model.loss import model_loss
from megatron.model.recompute import Recompute
from megatron.model.sizes import Place, Sizes


class DecoderModel(nn.Module):
    """The parts of a decoder and what is made of its last hidden states; a family's ``forward`` leads there.

    Args:
        embedding: built from (sizes, place); its table is ``word``.
        layer: built from (sizes, place, number).
        norm: makes the last norm.
    """

    loss_weighting = "tokens"  # for the start table

    def __init__(
        self,
        sizes: Sizes,
        place: Place | None,
        *,
        embedding: Callable[[Any, Place], nn.Module],
        layer: Callable[[Any, Place, int], nn.Module],
        norm: Callable[[Any], nn.Module],
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.place = place or Place()
        self.recompute = Recompute(sizes, self.place)
        self.embedding: Any = embedding(sizes, self.place)
        self.layers = nn.ModuleList(layer(sizes, self.place, i) for i in range(sizes.num_layers))
        self.final_norm = self.place.on_part(norm(sizes))
        self.head = Head(sizes, self.place) if sizes.untie_embeddings else None

    def units(self) -> list[nn.Module]:
        """Return what is cut into pipeline stages, in order; a tied head is the embedding."""
        return [self.embedding, *self.layers, self.final_norm, self.embedding if self.head is None else self.head]

    def finish(
        self, x: torch.Tensor, labels: torch.Tensor | None, loss_mask: torch.Tensor | None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the logits, or with ``labels`` and ``loss_mask`` the pair (loss sum, token count).

        Shapes:
            x [s, b, h], of the last layer
            labels, loss_mask [b, s]
            output logits [s, b, v/t]
        """
        logits = self._logits(self.final_norm(x))  # [s, b, v/t]
        if labels is None or loss_mask is None:
            return whole_logits(logits)
        return model_loss(logits, labels, loss_mask, self.sizes, self.place)

    def _logits(self, x: torch.Tensor) -> Logits:
        if self.head is None:
            return head_output(x, self.embedding.word.weight, self.sizes, self.place)
        logits: Logits = self.head(x)
        return logits


def example_inputs(config: Config, words: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what a decoder with positions takes beside its labels; ``words(length)`` makes tokens [b, length]."""
    tokens = words(config.batch.seq_length)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return {"tokens": tokens, "position_ids": positions.repeat(tokens.shape[0], 1)}

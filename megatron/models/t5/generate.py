"""Generation with T5."""

from __future__ import annotations

from typing import Any

import torch

from megatron.models.common.generation import (
    CachedModel,
    ModelStage,
    Rows,
    filled_up,
    forward_through_stages,
    to_all_stages,
)
from megatron.models.common.language_model import Logits
from megatron.models.t5.config import t5_units
from megatron.models.t5.layers import T5ModelArgs
from megatron.models.t5.model import T5DecoderLayer, T5EncoderLayer, embed, tied_logits

PADDING = -1
"""Segment of padding in a source; no token attends to it."""


class T5Reader(CachedModel):
    """Cached decoder that encodes its sources once. Construction and methods are collective over the replica.

    The encoder's output is broadcast to all stages once; each decoder layer caches its cross-attention keys and values.
    """

    def __init__(self, part: ModelStage, sources: Rows, capacity: int) -> None:
        assert isinstance(part.sizes, T5ModelArgs)
        self.sizes: T5ModelArgs = part.sizes
        units = t5_units(self.sizes.enc_layers, self.sizes.dec_layers)
        super().__init__(part, capacity, range(units.dec_embedding, units.dec_norm))
        tokens, last = filled_up(sources)  # [b, s_e], [b]
        is_padding = torch.arange(tokens.shape[1]) > last[:, None]  # [b, s_e]
        self.sources = tokens.to(part.device)
        has_padding = bool(is_padding.any())
        self.segments = torch.where(is_padding, PADDING, 0).int().to(part.device) if has_padding else None
        shape = (tokens.shape[1], len(sources), self.sizes.hidden_size)
        output = forward_through_stages(part, range(units.enc_norm + 1), self._encode, shape)
        memory = to_all_stages(part, output, shape, part.stages[units.enc_norm])  # [s_e, b, h]
        self.memory: torch.Tensor | None = memory

    def _encode(self, number: int, x: torch.Tensor | None) -> torch.Tensor:
        unit = self.part.units[number]
        if x is None:
            options: dict[str, Any] = {
                "sizes": self.sizes,
                "place": self.part.place,
                "side": "encoder",
                "training": False,
            }
            return embed(self.sources, unit.word, getattr(unit, "position", None), segments=self.segments, **options)
        if isinstance(unit, T5EncoderLayer):
            return T5EncoderLayer.forward(unit, x, self.part.biases[number], self.segments)
        return getattr(unit, "norm", unit)(x)

    def read(self, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor) -> torch.Tensor | None:
        logits = super().read(tokens, positions, last)
        self.memory = None  # its keys and values are cached from now on
        return logits

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        if self.segments is not None:
            self.segments = self.segments[torch.tensor(rows, device=self.segments.device)]

    def embedded(self, unit: Any) -> torch.Tensor:
        x = unit.word(self.tokens.t())  # [s, b, h]
        position = getattr(unit, "position", None)
        return x if position is None else x + position(self.positions.t())

    def layer(self, number: int, unit: Any, x: torch.Tensor) -> torch.Tensor:
        dec_segments = None if self.segments is None else torch.zeros_like(self.tokens, dtype=torch.int32)
        return T5DecoderLayer.forward(
            unit, x, self.memory, self.part.biases[number], self.segments, dec_segments, self.caches[number]
        )

    def tied_logits(self, x: torch.Tensor, weight: torch.Tensor) -> Logits:
        return tied_logits(x, weight, self.sizes, self.part.place)

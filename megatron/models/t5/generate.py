"""Generation with T5."""

from __future__ import annotations

from typing import Any

import torch

from megatron.models.common.generation import (
    CachedModel,
    ModelStage,
    TokenRows,
    broadcast_from_stage,
    forward_through_stages,
    pad_rows,
)
from megatron.models.common.language_model import Logits
from megatron.models.t5.config import t5_units
from megatron.models.t5.layers import T5ModelArgs
from megatron.models.t5.model import T5DecoderLayer, T5EncoderLayer, embed, tied_logits

PADDING = -1
"""Segment of padding in a source; no token attends to it."""


class CachedT5(CachedModel):
    """Cached decoder that encodes its sources once. Construction and methods are collective over the replica.

    The encoder's output is broadcast to all stages once; each decoder layer caches its cross-attention keys and values.
    """

    def __init__(self, model_stage: ModelStage, sources: TokenRows, capacity: int) -> None:
        assert isinstance(model_stage.args, T5ModelArgs)
        self.args: T5ModelArgs = model_stage.args
        units = t5_units(self.args.enc_layers, self.args.dec_layers)
        super().__init__(model_stage, capacity, range(units.dec_embedding, units.dec_norm))
        tokens, last_idx = pad_rows(sources)  # [b, s_e], [b]
        is_padding = torch.arange(tokens.shape[1]) > last_idx[:, None]  # [b, s_e]
        self.sources = tokens.to(model_stage.device)
        has_padding = bool(is_padding.any())
        self.segments = torch.where(is_padding, PADDING, 0).int().to(model_stage.device) if has_padding else None
        shape = (tokens.shape[1], len(sources), self.args.hidden_size)
        output = forward_through_stages(model_stage, range(units.enc_norm + 1), self._encode, shape)
        memory = broadcast_from_stage(model_stage, output, shape, model_stage.stages[units.enc_norm])  # [s_e, b, h]
        self.memory: torch.Tensor | None = memory

    def _encode(self, unit_idx: int, x: torch.Tensor | None) -> torch.Tensor:
        unit = self.model_stage.units[unit_idx]
        if x is None:
            embed_kwargs: dict[str, Any] = {
                "args": self.args,
                "parallel": self.model_stage.parallel,
                "side": "encoder",
                "training": False,
            }
            return embed(
                self.sources, unit.word, getattr(unit, "position", None), segments=self.segments, **embed_kwargs
            )
        if isinstance(unit, T5EncoderLayer):
            return T5EncoderLayer.forward(unit, x, self.model_stage.biases[unit_idx], self.segments)
        return getattr(unit, "norm", unit)(x)

    def read(self, tokens: torch.Tensor, positions: torch.Tensor, last_idx: torch.Tensor) -> torch.Tensor | None:
        logits = super().read(tokens, positions, last_idx)
        self.memory = None  # its keys and values are cached from now on
        return logits

    def keep(self, row_indices: list[int]) -> None:
        super().keep(row_indices)
        if self.segments is not None:
            self.segments = self.segments[torch.tensor(row_indices, device=self.segments.device)]

    def embed(self, unit: Any) -> torch.Tensor:
        x = unit.word(self.tokens.t())  # [s, b, h]
        position = getattr(unit, "position", None)
        return x if position is None else x + position(self.positions.t())

    def apply_layer(self, unit_idx: int, unit: Any, x: torch.Tensor) -> torch.Tensor:
        dec_segments = None if self.segments is None else torch.zeros_like(self.tokens, dtype=torch.int32)
        return T5DecoderLayer.forward(
            unit, x, self.memory, self.model_stage.biases[unit_idx], self.segments, dec_segments, self.caches[unit_idx]
        )

    def tied_logits(self, x: torch.Tensor, weight: torch.Tensor) -> Logits:
        return tied_logits(x, weight, self.args, self.model_stage.parallel)

"""RotaryPositions: positions of the tokens that an attention layer sees, and their rotary angles."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron.models.common.kv_cache import LayerKVCache
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.ops.positions import Rotary, rotary_cos_sin


class RotaryPositions:
    """Positions and rotary angles of this rank's tokens in one attention layer.

    Args:
        rotary: rotary embedding of the layer; None: the layer has no rotary positions.
    """

    def __init__(self, args: ModelArgs, parallel: ParallelContext, rotary: Rotary | None) -> None:
        self.rotary, self._parallel = rotary, parallel
        self._max_positions = args.max_position_embeddings
        self._long_rotary: Rotary | None = None
        if rotary is not None and rotary.scaling == "longrope":
            self._long_rotary = replace(rotary, is_long=True)

    def cos_sin(
        self, heads: torch.Tensor, cache: LayerKVCache | None, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``rotary_cos_sin`` for the positions of ``heads`` [b, any number, s, d].

        longrope selects the factors by the length of the full sequence. With a cache, that is the capacity of its rows,
        because cached keys have been rotated.
        """
        rotary = self.rotary
        assert rotary is not None
        if self._long_rotary is not None:
            length = heads.shape[2] * self._parallel.context.size if cache is None else cache.slots.capacity
            rotary = self._long_rotary if length > rotary.original_positions else rotary
        positions, max_positions = self.of_tokens(heads, cache, positions)
        return rotary_cos_sin(rotary, heads, positions, max_positions)

    def of_tokens(
        self, heads: torch.Tensor, cache: LayerKVCache | None, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, int]:
        """Return the positions of ``heads`` [b, any number, s, d], None for 0 ... s-1, and their exclusive upper bound.

        With a cache they are its positions, otherwise ``positions`` if given, otherwise indices into the full sequence.
        """
        if cache is not None:
            return cache.slots.positions, cache.slots.stop
        context_size, local_length = self._parallel.context.size, heads.shape[2]
        if context_size == 1:
            return positions, self._max_positions
        if positions is None:
            positions = self._parallel.positions(local_length, heads.device).unsqueeze(0)
        return positions, max(self._max_positions, local_length * context_size)

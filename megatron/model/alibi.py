"""The ALiBi biases of one rank, made once for all layers that share them."""

from __future__ import annotations

from functools import partial

import torch

from megatron.model.cache import Slots
from megatron.model.last_made import LastMade
from megatron.model.sizes import MptSizes, Place
from megatron.mpu.layers import divide
from megatron.ops.alibi import alibi_bias, alibi_slopes, within_documents


class AlibiBias:
    """The biases of this rank's heads, for the layers of a stage: the heads of tensor rank r begin at r a / t.

    It keeps the causal bias of one sequence length, and the one within documents of one micro-batch: so all layers of
    a forward add the same tensor, which also is in memory once for their backward. No rank sends any of it.

    Shapes:
        biases [1 or b, a/t, s, s_k]
    """

    def __init__(self, sizes: MptSizes, place: Place) -> None:
        self._place = place
        heads = divide("--num-attention-heads", sizes.num_attention_heads, place.group)
        first = place.group.rank * heads
        self.slopes = alibi_slopes(sizes.num_attention_heads, sizes.alibi_bias_max)[first : first + heads]
        self._causal: torch.Tensor | None = None
        self._within, self._pass = LastMade(), LastMade()

    @torch.compiler.disable  # what is kept from one call to the next is no part of a graph
    def for_hidden(self, x: torch.Tensor, segment_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return what the layers add that read ``x`` [s, b, h]; with ``segment_ids`` [b, s] documents are apart."""
        causal, length = self._causal, self._place.length(x)
        if causal is None or (causal.shape[-1], causal.dtype, causal.device) != (length, x.dtype, x.device):
            positions = torch.arange(length, device=x.device)
            causal = self._causal = self._make(positions.unsqueeze(0), positions, x.dtype)
            self._within.forget()
        if segment_ids is None:
            return causal
        return self._within.of(segment_ids, partial(within_documents, causal, segment_ids))

    def for_slots(self, slots: Slots, dtype: torch.dtype) -> torch.Tensor:
        """Return the bias of a pass that reads from the caches, whose queries stand at ``slots.positions``."""
        assert slots.positions is not None
        positions = slots.positions if slots.mask is not None else slots.positions[:1]  # in a first pass rows are alike
        keys = torch.arange(slots.stop, device=positions.device)
        return self._pass.of(slots.positions, partial(self._make, positions, keys, dtype))

    def _make(self, queries: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        slopes = torch.tensor(self.slopes, dtype=torch.float64, device=keys.device)
        return alibi_bias(slopes, queries, keys, dtype)

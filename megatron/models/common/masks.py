"""Attention masks for documents, windows and ALiBi, shared by all layers of a stage."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch

from megatron.models.common.attention import slopes_of_heads
from megatron.models.common.kv_cache import KVCacheSlots
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.ops.attention import document_mask, lowest, segment_mask
from megatron.ops.document_attention import document_starts, way_of
from megatron.ops.positions import alibi_bias, within_documents

# Tensors that are computed once per micro-batch and shared by all layers of a stage.


class LastValueCache:
    """Cache of one value computed from a tensor; valid for the same, unmodified tensor."""

    def __init__(self) -> None:
        self._key: tuple[weakref.ref[torch.Tensor], int] | None = None
        self._made: torch.Tensor | None = None

    def of(self, key: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the cached value if it was computed for ``key``; otherwise call ``make`` and cache its result."""
        is_known = self._key is not None and self._key[0]() is key and self._key[1] == key._version
        if self._made is None or not is_known:
            self._made, self._key = make(), (weakref.ref(key), key._version)
        return self._made

    def forget(self) -> None:
        """Drop the cached value."""
        self._key = self._made = None


class SharedMask:
    """Document mask of a micro-batch. All layers of a stage share one tensor, so it is saved for backward only once.

    Args:
        make: computes the mask from segment ids [b, s] and hidden states.
    """

    def __init__(self, make: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self._make, self._last = make, LastValueCache()

    @torch.compiler.disable  # the cache persists between calls and cannot be part of a graph
    def of(self, segment_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the mask of ``segment_ids`` for the layers whose input is ``x``."""
        return self._last.of(segment_ids, partial(self._make, segment_ids, x))


# The masks of a decoder, for layers with and without a window.
#
# | case | mask |
# |---|---|
# | causal attention only | None |
# | documents, if ``document_attention`` supports the layers | int32 [b, s], start of each position's document |
# | no documents, context parallelism, if it supports the layers | int32 [b, s], zeros |
# | documents in all other cases, windows | bool [b or 1, 1, s, s], True where a query may attend |
# | ALiBi, also with documents and windows | additive [b or 1, a/t, s, s] |
#
# A stage caches the mask of one sequence length and the document masks of one micro-batch, both with and without a
# window. All layers use the same tensor in a forward pass, so it is saved for backward only once. Masks are never sent
# between ranks.
#
# With context parallelism the rows are this rank's queries, [b or 1, ..., s/c, s], or with --cp-comm-type a2a the
# queries of its heads, [b or 1, a/tc, s, s]. The ranks of the context group exchange segment ids.


class Masks:
    """The masks of the layers of one stage, for this rank's heads; the heads of tensor rank r start at r a / t.

    Source: a window as in Beltagy et al. 2020, "Longformer", to the left only; Mistral 7B, 2023.
    """

    def __init__(self, sizes: ModelArgs, place: ParallelContext) -> None:
        self._sizes, self._place = sizes, place
        self.window = sizes.window_size
        self.slopes = slopes_of_heads(sizes, place)
        self._has_last_queries = place.context.size > 1 and not place.cuts_heads
        # True if layers need a mask even without segment ids
        self.are_needed = self.slopes is not None or bool(self.window) or self._has_last_queries
        self._causal: dict[bool, torch.Tensor | None] = {False: None, True: None}
        self._within, self._pass = ({has_window: LastValueCache() for has_window in (False, True)} for _ in range(2))
        self._starts = LastValueCache()
        self._whole: torch.Tensor | None = None

    @torch.compiler.disable  # the cache persists between calls and cannot be part of a graph
    def of(
        self, x: torch.Tensor, segment_ids: torch.Tensor | None = None, has_window: bool = False
    ) -> torch.Tensor | None:
        """Return the mask of the layers whose input is ``x`` [s, b, h].

        Args:
            segment_ids: [b, s], the document of each token, to which attention is restricted; None: one document.
            has_window: the layers have a window.
        """
        length = self._place.length(x)
        has_window = self._has_window(has_window, length)
        if segment_ids is None and self.slopes is None and not has_window and not self._needs_causal(x):
            return None
        if segment_ids is not None and self._has_lengths(x, length):
            return self._starts.of(segment_ids, partial(self._starts_of, segment_ids))
        if segment_ids is None and self._place.context.size > 1 and self._has_lengths(x, length):
            return self._one_document(x, length)
        causal = self._causal_of(length, x, has_window)
        if segment_ids is None:
            return causal
        within = _within if self._place.context.size == 1 else self._within_context
        return self._within[has_window].of(segment_ids, partial(within, causal, segment_ids))

    def for_slots(self, slots: KVCacheSlots, dtype: torch.dtype, has_window: bool = False) -> torch.Tensor | None:
        """Return the mask of a forward pass with KV caches, whose queries are at ``slots.positions``."""
        has_window = self._has_window(has_window, slots.stop)
        if self.slopes is None and not has_window:
            return slots.mask
        assert slots.positions is not None
        # In the first pass all rows are equal.
        positions = slots.positions if slots.mask is not None else slots.positions[:1]
        keys = torch.arange(slots.stop, device=positions.device)
        return self._pass[has_window].of(slots.positions, partial(self._make, positions, keys, dtype, has_window))

    def _starts_of(self, segment_ids: torch.Tensor) -> torch.Tensor:
        """Return the document starts of this rank's queries. Collective with context parallelism."""
        _, keys = self._place.queries_and_keys(segment_ids)
        return self._place.own_queries(document_starts(keys))

    def _one_document(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """Return the document starts of samples with one document: zeros."""
        num_queries = length if self._place.cuts_heads else length // self._place.context.size
        if self._whole is None or (self._whole.shape, self._whole.device) != ((x.shape[1], num_queries), x.device):
            self._whole = torch.zeros(x.shape[1], num_queries, dtype=torch.int32, device=x.device)
        return self._whole

    def _has_lengths(self, x: torch.Tensor, length: int) -> bool:
        """Return True if masks are document starts: there is no attention dropout, and a kernel is available."""
        sizes = self._sizes
        is_plain = self.slopes is None and not sizes.attn_logit_softcapping
        if sizes.attention_dropout:
            return False
        return way_of(x, length, sizes.kv_hidden_size, is_plain=is_plain) is not None

    def _needs_causal(self, x: torch.Tensor) -> bool:
        """Return True if layers need an explicit causal mask, because this rank has only part of the queries.

        On CUDA, a kernel applies this mask implicitly, except with attention dropout or soft-caps.
        """
        sizes = self._sizes
        is_special = sizes.attention_dropout > 0 or sizes.attn_logit_softcapping > 0
        return self._has_last_queries and (is_special or x.device.type != "cuda")

    def _has_window(self, has_window: bool, length: int) -> bool:
        """Return True if the layer has a window that hides a key in sequences of ``length``."""
        return has_window and 0 < self.window < length - 1

    def _causal_of(self, length: int, x: torch.Tensor, has_window: bool) -> torch.Tensor | None:
        """Return the mask of samples with one document; cached until length, dtype or device change."""
        if self.slopes is None and not has_window and self._place.context.size == 1:
            return None
        mask = self._causal[has_window]
        dtype = torch.bool if self.slopes is None else x.dtype
        if mask is None or (mask.shape[-1], mask.dtype, mask.device) != (length, dtype, x.device):
            queries = self._place.query_positions(length, x.device).unsqueeze(0)
            positions = torch.arange(length, device=x.device)
            mask = self._causal[has_window] = self._make(queries, positions, x.dtype, has_window)
            self._within[has_window].forget()
        return mask

    def _make(self, queries: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype, has_window: bool) -> torch.Tensor:
        """Return the mask of queries at positions [b or 1, s] and keys at positions [s_k]."""
        distance = (queries.unsqueeze(-1) - keys).unsqueeze(1)  # [b, 1, s, s_k]
        if self.slopes is None:
            return (distance >= 0) & (distance <= self.window) if has_window else distance >= 0
        slopes = torch.tensor(self.slopes, dtype=torch.float64, device=keys.device)
        bias = alibi_bias(slopes, queries, keys, dtype)
        return bias.masked_fill_(distance > self.window, lowest(dtype)) if has_window else bias

    def _within_context(self, causal: torch.Tensor | None, segment_ids: torch.Tensor) -> torch.Tensor:
        """Restrict the mask ``causal`` to documents, which may extend over several ranks. Collective."""
        assert causal is not None  # ``_causal_of`` always returns a mask with context parallelism
        same_document = segment_mask(*self._place.queries_and_keys(segment_ids))
        return (
            causal & same_document
            if causal.dtype == torch.bool
            else causal.masked_fill(~same_document, lowest(causal.dtype))
        )


def _within(causal: torch.Tensor | None, segment_ids: torch.Tensor) -> torch.Tensor:
    """Restrict the mask ``causal`` to documents."""
    if causal is None:
        return document_mask(segment_ids)
    if causal.dtype == torch.bool:
        return causal & document_mask(segment_ids)
    return within_documents(causal, segment_ids)

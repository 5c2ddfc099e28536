"""Attention masks for documents, windows and ALiBi, shared by all layers of a stage."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megatron.config.decoder import has_sinks
from megatron.config.layer_features import VANILLA
from megatron.config.layer_types import layer_types
from megatron.models.common.attention import local_alibi_slopes
from megatron.models.common.cache_slots import KVCacheSlots
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.ops.attention import document_mask, mask_value, segment_mask
from megatron.ops.document_attention import document_starts, select_implementation
from megatron.ops.positions import alibi_bias, mask_other_documents

# Tensors that are computed once per micro-batch and shared by all layers of a stage.


class LastValueCache:
    """Cache of one value computed from a tensor; valid for the same, unmodified tensor."""

    def __init__(self) -> None:
        self._key: tuple[weakref.ref[torch.Tensor], int] | None = None
        self._value: torch.Tensor | None = None

    def get(self, key: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the cached value if it was computed for ``key``; otherwise call ``compute`` and cache its result."""
        is_hit = self._key is not None and self._key[0]() is key and self._key[1] == key._version
        if self._value is None or not is_hit:
            self._value, self._key = compute(), (weakref.ref(key), key._version)
        return self._value

    def clear(self) -> None:
        """Drop the cached value."""
        self._key = self._value = None


class SharedMask:
    """Document mask of a micro-batch. All layers of a stage share one tensor, so it is saved for backward only once.

    Args:
        compute: computes the mask from segment ids [b, s] and hidden states.
    """

    def __init__(self, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self._compute, self._cache = compute, LastValueCache()

    @torch.compiler.disable  # the cache persists between calls and cannot be part of a graph
    def get(self, segment_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the mask of ``segment_ids`` for the layers whose input is ``x``."""
        return self._cache.get(segment_ids, partial(self._compute, segment_ids, x))


# The masks of a decoder, for layers with and without a window.
#
# | case | mask |
# |---|---|
# | causal attention only | None |
# | documents, if ``document_attention`` supports the layers | int32 [b, s], start of each position's document |
# | no documents, but context parallelism or sinks, if it supports the layers | int32 [b, s], zeros |
# | documents in all other cases, windows | bool [b or 1, 1, s, s], True where a query may attend |
# | ALiBi, also with documents and windows | additive [b or 1, a/t, s, s] |
#
# A stage caches the mask of one sequence length and the document masks of one micro-batch, both with and without a
# window. All layers use the same tensor in a forward pass, so it is saved for backward only once. Masks are never sent
# between ranks.
#
# With context parallelism the rows are this rank's queries, [b or 1, ..., s/c, s], or with --cp-comm-type a2a the
# queries of its heads, [b or 1, a/tc, s, s]. With a2a+p2p and n ranks in the inner group, they are [b or 1, a/tn, sn/c,
# s]. Layers with another type have other masks (``of_layer``). The ranks of the context group exchange segment ids.


class Masks:
    """The masks of the layers of one stage, for this rank's heads; the heads of tensor rank r start at r a / t.

    Source: Beltagy et al. 2020, "Longformer"; Mistral 7B, 2023, for windows of preceding keys only.
    """

    def __init__(self, args: ModelArgs, parallel: ParallelContext) -> None:
        self._args, self._parallel = args, parallel
        self.window = args.window_size
        types = layer_types(args)
        self.has_attention = any(layer_type.has_attention for layer_type in types)
        self.has_recurrent_layers = any(layer_type.recurrent_mixer for layer_type in types)
        self.slopes = local_alibi_slopes(args, parallel)
        self._has_query_shard = parallel.query_group.size > 1
        # True if layers need a mask even without segment ids
        self.is_always_needed = self.slopes is not None or bool(self.window) or self._has_query_shard
        self._causal_masks: dict[bool, torch.Tensor | None] = {False: None, True: None}
        self._document_masks = {has_window: LastValueCache() for has_window in (False, True)}
        self._cached_pass_masks = {has_window: LastValueCache() for has_window in (False, True)}
        self._document_starts, self._full_starts = LastValueCache(), LastValueCache()
        self._zero_starts: torch.Tensor | None = None
        self._masks_by_type: dict[Any, Masks] = {parallel.cp_comm_type: self}

    def of_layer(self, layer: int) -> Masks:
        """Return the masks of a layer, which depend on the communication of its attention over the context ranks."""
        parallel = self._parallel.for_layer(layer)
        if parallel.cp_comm_type not in self._masks_by_type:
            self._masks_by_type[parallel.cp_comm_type] = Masks(self._args, parallel)
        return self._masks_by_type[parallel.cp_comm_type]

    @torch.compiler.disable  # the cache persists between calls and cannot be part of a graph
    def get_mask(
        self, x: torch.Tensor, segment_ids: torch.Tensor | None = None, has_window: bool = False
    ) -> torch.Tensor | None:
        """Return the mask of the layers whose input is ``x`` [s, b, h].

        Args:
            segment_ids: [b, s], the document of each token, to which attention is restricted; None: one document.
            has_window: the layers have a window.
        """
        length = self._parallel.full_length(x)
        has_layer_sinks = has_sinks(self._args, has_window=has_window)
        has_window = self._has_effective_window(has_window, length)
        is_causal_only = segment_ids is None and self.slopes is None and not has_window and not has_layer_sinks
        if is_causal_only and not self._needs_causal_mask(x):
            return None
        if segment_ids is not None and self._has_document_starts(x, length):
            return self._document_starts.get(segment_ids, partial(self._compute_document_starts, segment_ids))
        prefers_starts = self._parallel.context.size > 1 or has_layer_sinks
        if segment_ids is None and prefers_starts and self._has_document_starts(x, length):
            return self._single_document_starts(x, length)
        causal = self._causal_mask(length, x, has_window)
        if segment_ids is None:
            return causal
        restrict = _restrict_to_documents if self._parallel.context.size == 1 else self._restrict_across_ranks
        return self._document_masks[has_window].get(segment_ids, partial(restrict, causal, segment_ids))

    @torch.compiler.disable
    def get_starts(self, segment_ids: torch.Tensor | None) -> torch.Tensor | None:
        """Return the document starts of recurrent mixers, int32 [b, s]; None for samples with one document.

        Unlike masks, they are those of the full sequence, in its natural order. Collective with context parallelism.

        Args:
            segment_ids: [b, s/c], of this rank's tokens.
        """
        if segment_ids is None or not self.has_recurrent_layers:
            return None
        return self._full_starts.get(segment_ids, partial(self._compute_full_starts, segment_ids))

    def _compute_full_starts(self, segment_ids: torch.Tensor) -> torch.Tensor:
        _query_segments, key_segments = self._parallel.query_and_key_segments(segment_ids)
        return document_starts(key_segments)

    def get_cached_mask(self, slots: KVCacheSlots, dtype: torch.dtype, has_window: bool = False) -> torch.Tensor | None:
        """Return the mask of a forward pass with KV caches, whose queries are at ``slots.positions``."""
        has_window = self._has_effective_window(has_window, slots.stop)
        if self.slopes is None and not has_window:
            return slots.mask
        assert slots.positions is not None
        # In the first pass all rows are equal.
        positions = slots.positions if slots.mask is not None else slots.positions[:1]
        keys = torch.arange(slots.stop, device=positions.device)
        return self._cached_pass_masks[has_window].get(
            slots.positions, partial(self._build_mask, positions, keys, dtype, has_window)
        )

    def _compute_document_starts(self, segment_ids: torch.Tensor) -> torch.Tensor:
        """Return the document starts of this rank's queries. Collective with context parallelism."""
        query_segments, key_segments = self._parallel.query_and_key_segments(segment_ids)
        return self._parallel.select_local_queries(document_starts(key_segments))

    def _single_document_starts(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """Return the document starts of samples with one document: zeros."""
        num_queries = length // self._parallel.query_group.size
        if self._zero_starts is None or (self._zero_starts.shape, self._zero_starts.device) != (
            (x.shape[1], num_queries),
            x.device,
        ):
            self._zero_starts = torch.zeros(x.shape[1], num_queries, dtype=torch.int32, device=x.device)
        return self._zero_starts

    def _has_document_starts(self, x: torch.Tensor, length: int) -> bool:
        """Return True if masks are document starts: there is no attention dropout, and a kernel is available."""
        args = self._args
        is_plain = self.slopes is None and not args.attn_logit_softcapping and args.softmax_type == VANILLA
        if args.attention_dropout:
            return False
        return select_implementation(x, length, args.padded_head_size, is_plain=is_plain) is not None

    def _needs_causal_mask(self, x: torch.Tensor) -> bool:
        """Return True if layers need an explicit causal mask, because this rank has only part of the queries.

        On CUDA, a kernel applies this mask implicitly, except with soft-caps or with --layout-independent-dropout of
        the probabilities.
        """
        args = self._args
        drops_probabilities = args.attention_dropout > 0 and self._parallel.streams.needs_probabilities
        is_special = drops_probabilities or args.attn_logit_softcapping > 0
        return self._has_query_shard and (is_special or x.device.type != "cuda")

    def _has_effective_window(self, has_window: bool, length: int) -> bool:
        """Return True if the layer has a window that hides a key in sequences of ``length``."""
        return has_window and 0 < self.window < length - 1

    def _causal_mask(self, length: int, x: torch.Tensor, has_window: bool) -> torch.Tensor | None:
        """Return the mask of samples with one document; cached until length, dtype or device change."""
        if self.slopes is None and not has_window and self._parallel.context.size == 1:
            return None
        mask = self._causal_masks[has_window]
        dtype = torch.bool if self.slopes is None else x.dtype
        if mask is None or (mask.shape[-1], mask.dtype, mask.device) != (length, dtype, x.device):
            queries = self._parallel.query_positions(length, x.device).unsqueeze(0)
            positions = torch.arange(length, device=x.device)
            mask = self._causal_masks[has_window] = self._build_mask(queries, positions, x.dtype, has_window)
            self._document_masks[has_window].clear()
        return mask

    def _build_mask(
        self, queries: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype, has_window: bool
    ) -> torch.Tensor:
        """Return the mask of queries at positions [b or 1, s] and keys at positions [s_k]."""
        distances = (queries.unsqueeze(-1) - keys).unsqueeze(1)  # [b, 1, s, s_k]
        if self.slopes is None:
            return (distances >= 0) & (distances <= self.window) if has_window else distances >= 0
        slopes = torch.tensor(self.slopes, dtype=torch.float64, device=keys.device)
        bias = alibi_bias(slopes, queries, keys, dtype)
        return bias.masked_fill_(distances > self.window, mask_value(dtype)) if has_window else bias

    def _restrict_across_ranks(self, causal: torch.Tensor | None, segment_ids: torch.Tensor) -> torch.Tensor:
        """Restrict the mask ``causal`` to documents, which may extend over several ranks. Collective."""
        assert causal is not None  # ``_causal_mask`` always returns a mask with context parallelism
        same_document = segment_mask(*self._parallel.query_and_key_segments(segment_ids))
        return (
            causal & same_document
            if causal.dtype == torch.bool
            else causal.masked_fill(~same_document, mask_value(causal.dtype))
        )


def _restrict_to_documents(causal: torch.Tensor | None, segment_ids: torch.Tensor) -> torch.Tensor:
    """Restrict the mask ``causal`` to documents."""
    if causal is None:
        return document_mask(segment_ids)
    if causal.dtype == torch.bool:
        return causal & document_mask(segment_ids)
    return mask_other_documents(causal, segment_ids)

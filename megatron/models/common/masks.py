"""What attention may look at, and what is added to its scores: documents, windows, ALiBi; once for all layers of a
stage.
"""

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

# What all layers of a stage share of a micro-batch, made once of a tensor that each of them is given.


class LastValueCache:
    """What was made of a tensor last, as long as it is the same tensor and nobody has written to it."""

    def __init__(self) -> None:
        self._key: tuple[weakref.ref[torch.Tensor], int] | None = None
        self._made: torch.Tensor | None = None

    def of(self, key: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what ``make`` returned for ``key`` last, or returns now."""
        is_known = self._key is not None and self._key[0]() is key and self._key[1] == key._version
        if self._made is None or not is_known:
            self._made, self._key = make(), (weakref.ref(key), key._version)
        return self._made

    def forget(self) -> None:
        """Make it anew the next time."""
        self._key = self._made = None


class SharedMask:
    """The mask of the documents of a micro-batch, for the layers of a stage: it is in memory once for their backward.

    Args:
        make: of segment ids [b, s] and hidden states, what layers take as their mask.
    """

    def __init__(self, make: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self._make, self._last = make, LastValueCache()

    @torch.compiler.disable  # what is kept from one call to the next is no part of a graph
    def of(self, segment_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the mask of ``segment_ids`` for the layers that read ``x``."""
        return self._last.of(segment_ids, partial(self._make, segment_ids, x))


# The masks of a decoder, of layers with a window and of those without.
#
# | | is |
# |---|---|
# | nothing of the following | None: attention is causal |
# | documents, where ``document_attention`` is for all that the layers have | int32 [b, s], where each begins |
# | nothing of documents with context parallelism, there too | the same, of samples of one document |
# | documents else, windows | bool [b or 1, 1, s, s], True where a query may look |
# | ALiBi, and with it documents and windows | numbers [b or 1, a/t, s, s] that are added to the scores |
#
# A stage keeps the mask of one sequence length and those within the documents of one micro-batch, with a window and
# without: all layers of a forward add the same tensor, which is in memory once for their backward. No rank sends any.
#
# With context parallelism the rows are this rank's queries alone, [b or 1, ..., s/c, s], or with --cp-comm-type a2a
# those of its heads, [b or 1, a/tc, s, s]; the ranks of the context group tell each other their documents.


class Masks:
    """The masks of the layers of one stage, of this rank's heads: those of tensor rank r begin at r a / t.

    Source: a window as of Beltagy et al. 2020, "Longformer", to the left alone; Mistral 7B, 2023.
    """

    def __init__(self, sizes: ModelArgs, place: ParallelContext) -> None:
        self._sizes, self._place = sizes, place
        self.window = sizes.window_size
        self.slopes = slopes_of_heads(sizes, place)
        self._has_last_queries = place.context.size > 1 and not place.cuts_heads
        # also where no documents are kept apart
        self.are_needed = self.slopes is not None or bool(self.window) or self._has_last_queries
        self._causal: dict[bool, torch.Tensor | None] = {False: None, True: None}
        self._within, self._pass = ({has: LastValueCache() for has in (False, True)} for _ in range(2))
        self._starts = LastValueCache()
        self._whole: torch.Tensor | None = None

    @torch.compiler.disable  # what is kept from one call to the next is no part of a graph
    def of(
        self, x: torch.Tensor, segment_ids: torch.Tensor | None = None, has_window: bool = False
    ) -> torch.Tensor | None:
        """Return the mask of the layers that read ``x`` [s, b, h]; with ``segment_ids`` [b, s] documents are apart."""
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
        """Return the mask of a pass that reads from the caches, whose queries stand at ``slots.positions``."""
        has_window = self._has_window(has_window, slots.stop)
        if self.slopes is None and not has_window:
            return slots.mask
        assert slots.positions is not None
        positions = slots.positions if slots.mask is not None else slots.positions[:1]  # in a first pass rows are alike
        keys = torch.arange(slots.stop, device=positions.device)
        return self._pass[has_window].of(slots.positions, partial(self._make, positions, keys, dtype, has_window))

    def _starts_of(self, segment_ids: torch.Tensor) -> torch.Tensor:
        """Return where the documents of this rank's queries begin among all keys; collective where others have some."""
        _, keys = self._place.queries_and_keys(segment_ids)
        return self._place.own_queries(document_starts(keys))

    def _one_document(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """Return where documents begin in samples of one."""
        own = length if self._place.cuts_heads else length // self._place.context.size
        if self._whole is None or (self._whole.shape, self._whole.device) != ((x.shape[1], own), x.device):
            self._whole = torch.zeros(x.shape[1], own, dtype=torch.int32, device=x.device)
        return self._whole

    def _has_lengths(self, x: torch.Tensor, length: int) -> bool:
        """Return whether documents go by where they begin: all that drops no probability, where there is a kernel."""
        sizes = self._sizes
        is_plain = self.slopes is None and not sizes.attn_logit_softcapping
        if sizes.attention_dropout:
            return False
        return way_of(x, length, sizes.kv_hidden_size, is_plain=is_plain) is not None

    def _needs_causal(self, x: torch.Tensor) -> bool:
        """Return whether layers know no causal rule for the last queries of a sequence: all but plain ones on CUDA."""
        sizes = self._sizes
        is_special = sizes.attention_dropout > 0 or sizes.attn_logit_softcapping > 0
        return self._has_last_queries and (is_special or x.device.type != "cuda")

    def _has_window(self, has_window: bool, length: int) -> bool:
        """Return whether a window of the layer, if it has one, leaves a key of so many out."""
        return has_window and 0 < self.window < length - 1

    def _causal_of(self, length: int, x: torch.Tensor, has_window: bool) -> torch.Tensor | None:
        """Return the mask without documents, that of the last call where it is the same."""
        if self.slopes is None and not has_window and self._place.context.size == 1:
            return None
        kept = self._causal[has_window]
        dtype = torch.bool if self.slopes is None else x.dtype
        if kept is None or (kept.shape[-1], kept.dtype, kept.device) != (length, dtype, x.device):
            queries = self._place.query_positions(length, x.device).unsqueeze(0)
            positions = torch.arange(length, device=x.device)
            kept = self._causal[has_window] = self._make(queries, positions, x.dtype, has_window)
            self._within[has_window].forget()
        return kept

    def _make(self, queries: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype, has_window: bool) -> torch.Tensor:
        """Return the mask of queries at positions [b or 1, s] and keys at [s_k]."""
        behind = (queries.unsqueeze(-1) - keys).unsqueeze(1)  # [b, 1, s, s_k]
        if self.slopes is None:
            return (behind >= 0) & (behind <= self.window) if has_window else behind >= 0
        slopes = torch.tensor(self.slopes, dtype=torch.float64, device=keys.device)
        bias = alibi_bias(slopes, queries, keys, dtype)
        return bias.masked_fill_(behind > self.window, lowest(dtype)) if has_window else bias

    def _within_context(self, causal: torch.Tensor | None, segment_ids: torch.Tensor) -> torch.Tensor:
        """Return the mask ``causal`` within documents that other ranks have pieces of. Collective."""
        assert causal is not None  # ``_causal_of`` makes it, for the last queries of a sequence have no other
        same = segment_mask(*self._place.queries_and_keys(segment_ids))
        return causal & same if causal.dtype == torch.bool else causal.masked_fill(~same, lowest(causal.dtype))


def _within(causal: torch.Tensor | None, segment_ids: torch.Tensor) -> torch.Tensor:
    """Return the mask ``causal`` within documents."""
    if causal is None:
        return document_mask(segment_ids)
    if causal.dtype == torch.bool:
        return causal & document_mask(segment_ids)
    return within_documents(causal, segment_ids)

"""Attention of this rank's queries to the keys of all ranks of the context group (--context-parallel-size)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.context_parallel import (
    gather_from_context_region,
    gather_rows,
    runs_of,
    scatter_heads_gather_sequence,
    scatter_sequence_gather_heads,
)
from megatron.mpu.groups import Group
from megatron.ops.attention import lower_right_attention


class ContextAttention:
    """What functions make of this rank's queries, and of the keys and values of the whole sequence.

    | cp_comm_type | is sent | is kept for the backward |
    |---|---|---|
    | all_gather, p2p | keys and values to all ranks, again in backward; their gradients back | own tokens |
    | a2a | queries, keys and values to the ranks of their heads, the context back | all tokens of 1/c of the heads |

    Shapes:
        query      [b, a/t, s/c, d]
        key, value [b, g/t, s/c, d]
        mask       of ``Masks``, or None for causal
        starts     int32 [b, s/c] or [b, s], of the queries that attention has on this rank
        output     [b, a/t, s/c, d]

    Args:
        function: of ``megatron.ops``; takes ``mask``, and what drops probabilities.
        by_starts: ``document_attention``.
    """

    def __init__(
        self,
        function: Callable[..., torch.Tensor],
        by_starts: Callable[..., torch.Tensor],
        sizes: ModelArgs,
        place: ParallelContext,
    ) -> None:
        self._function, self._by_starts, self._place = function, by_starts, place
        self._causal = partial(lower_right_attention, scale=sizes.softmax_scale or None)
        self._is_recomputed = sizes.checkpoint_activations or sizes.recompute_attention

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        drop: Callable[..., torch.Tensor] | None = None,
        **how: Any,
    ) -> torch.Tensor:
        group = self._place.context
        if self._place.cuts_heads:
            if drop is not None:
                how["drop"] = partial(drop, first_head=group.rank * (query.shape[1] // group.size))
            return self._by_heads(partial(self._function, mask=mask, **how), query, key, value)
        if drop is not None:
            how["drop"] = partial(drop, runs=runs_of(query.shape[2], group))
        if mask is None and not how:
            return self._gathering(partial(self._by_runs, self._causal), query, key, value)
        return self._gathering(partial(self._function, mask=mask, **how), query, key, value)

    def within_documents(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor,
        stops: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the same where queries see the keys from ``starts`` to their own, or up to ``stops``."""
        if self._place.cuts_heads:
            return self._by_heads(partial(self._by_starts, starts=starts, stops=stops), query, key, value)
        if stops is not None:
            return self._gathering(partial(self._by_starts, starts=starts, stops=stops), query, key, value)
        return self._gathering(partial(self._by_runs, self._by_starts, starts=starts), query, key, value)

    def _by_heads(self, function: Callable[..., torch.Tensor], *parts: torch.Tensor) -> torch.Tensor:
        """Return what ``function`` makes of whole sequences of 1/c of the heads."""
        group = self._place.context
        return scatter_sequence_gather_heads(function(*[scatter_heads_gather_sequence(x, group) for x in parts]), group)

    def _gathering(
        self, function: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return what ``function`` makes of own queries and of the keys and values of all ranks."""
        key, value, as_parts = _gathered(key, value, self._place.context)
        with nullcontext() if self._is_recomputed else as_parts:
            return function(query, key, value)

    def _by_runs(
        self,
        function: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the contexts of both runs: each sees the keys up to its end."""
        parts = []
        for start, stop, first in runs_of(query.shape[2], self._place.context):
            seen = first + stop - start
            known = query[:, :, start:stop], key[:, :, :seen], value[:, :, :seen]
            parts.append(function(*known) if starts is None else function(*known, starts[:, start:stop], first=first))
        return torch.cat(parts, dim=2)


def _gathered(
    key: torch.Tensor, value: torch.Tensor, group: Group
) -> tuple[torch.Tensor, torch.Tensor, saved_tensors_hooks]:
    """Return keys and values of the whole sequence, and the context within which what is saved of them is not kept.

    Shapes:
        key, value [b, g/t, s/c, d]
        output     2 x [b, g/t, s, d]
    """
    part = torch.stack((key, value)).permute(3, 0, 1, 2, 4).contiguous()  # [s/c, 2, b, g/t, d]
    whole = gather_from_context_region(part, group)  # [s, 2, b, g/t, d]
    kept = _KeptAsPart(part.detach(), whole.untyped_storage().data_ptr(), group)
    key, value = whole.permute(1, 2, 3, 0, 4).unbind()
    return key, value, saved_tensors_hooks(kept.pack, kept.unpack)


class _KeptAsPart:
    """What autograd saves of rows gathered over ``group``: nothing but this rank's own; they are gathered once more.

    What is saved of them, or of views of them, becomes a place in their memory. All else is saved as it is.

    Args:
        memory: where the gathered rows begin.
    """

    def __init__(self, part: torch.Tensor, memory: int, group: Group) -> None:
        self._part, self._memory, self._group = part, memory, group
        self._again: torch.Tensor | None = None
        self._left = 0

    def pack(self, x: torch.Tensor) -> Any:
        """Return what is kept of ``x``."""
        if x.untyped_storage().data_ptr() != self._memory:
            return x
        self._left += 1
        return x.shape, x.stride(), x.storage_offset()

    def unpack(self, kept: Any) -> torch.Tensor:
        """Return what ``pack`` was given. Collective, the first time in a backward."""
        if isinstance(kept, torch.Tensor):
            return kept
        if self._again is None:
            self._again = gather_rows(self._part, self._group)
        found = self._again.as_strided(*kept)
        self._left -= 1
        if self._left <= 0:  # the last of them: its reader keeps it as long as it needs it
            self._again = None
        return found

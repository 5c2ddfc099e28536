"""Attention of this rank's queries to the keys of all ranks of the context group (--context-parallel-size)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.models.common.model_args import ModelArgs, ParallelContext
from megatron.mpu.context_parallel import (
    gather_from_context_region,
    gather_rows,
    runs_of,
    scatter_heads_gather_sequence,
    scatter_sequence_gather_heads,
)
from megatron.mpu.groups import Group
from megatron.ops.lower_right_attention import lower_right_attention


class ContextAttention:
    """What ``function`` makes of this rank's queries, and of the keys and values of the whole sequence.

    | cp_comm_type | is sent | is kept for the backward |
    |---|---|---|
    | all_gather, p2p | keys and values to all ranks, again in backward; their gradients back | own tokens |
    | a2a | queries, keys and values to the ranks of their heads, the context back | all tokens of 1/c of the heads |

    Shapes:
        query      [b, a/t, s/c, d]
        key, value [b, g/t, s/c, d]
        mask       of ``Masks``, or None for causal
        output     [b, a/t, s/c, d]

    Args:
        function: of ``megatron.ops``; takes ``mask``, and what drops probabilities.
    """

    def __init__(self, function: Callable[..., torch.Tensor], sizes: ModelArgs, place: ParallelContext) -> None:
        self._function, self._place, self._scale = function, place, sizes.softmax_scale or None
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
            whole = [scatter_heads_gather_sequence(part, group) for part in (query, key, value)]
            if drop is not None:
                how["drop"] = partial(drop, first_head=group.rank * whole[0].shape[1])
            return scatter_sequence_gather_heads(self._function(*whole, mask=mask, **how), group)
        if drop is not None:
            how["drop"] = partial(drop, runs=runs_of(query.shape[2], group))
        key, value, as_parts = _gathered(key, value, group)
        with nullcontext() if self._is_recomputed else as_parts:
            if mask is None and not how:
                return self._causal(query, key, value)
            return self._function(query, key, value, mask=mask, **how)

    def _causal(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the contexts of both runs: each sees the keys up to its end."""
        parts = []
        for start, stop, first in runs_of(query.shape[2], self._place.context):
            seen = first + stop - start
            known = key[:, :, :seen], value[:, :, :seen]
            parts.append(lower_right_attention(query[:, :, start:stop], *known, self._scale))
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

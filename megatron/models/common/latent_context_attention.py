"""Multi-latent attention with context parallelism: ranks exchange latents instead of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.models.common.context_attention import ContextAttention
from megatron.models.common.logit_meter import LogitMeter
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.context_parallel import (
    gather_from_context_region,
    scatter_heads_gather_sequence,
    scatter_sequence_gather_heads,
)
from megatron.ops.padded_heads import pad_head, pad_heads

Expand = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Function from latents, rotated keys and optionally a slice of heads to keys and values."""


class LatentContextAttention(ContextAttention):
    """Context-parallel attention whose keys and values are projected from the gathered latents of all ranks.

    | cp_comm_type | communicated | saved for backward |
    |---|---|---|
    | all_gather, p2p | all-gather latents; reduce-scatter their gradients | the latents of all tokens |
    | a2a | the same; all-to-all queries and output | also keys and values of 1/c of the heads |
    | a2a+p2p | the same; all-to-all over the inner group | the latents of all tokens |

    A token has r_kv + d_r elements of latent and rotated key, against 2 a d / t of keys and values. In return every
    rank projects the keys and values of all tokens, for the heads that it attends with. Except with a2a, it projects
    them again in backward.

    Shapes:
        query  [b, a/t, s/c, d]
        key    the latents, [b, 1, s/c, r_kv]
        value  the rotated keys, [b, 1, s/c, d_r]
        output [b, a/t, s/c, d_v]

    Args:
        expand: projects latents and rotated keys of the full sequence to the keys and values of a slice of heads.
    """

    def __init__(
        self,
        function: Callable[..., torch.Tensor],
        document_function: Callable[..., torch.Tensor],
        args: ModelArgs,
        parallel: ParallelContext,
        expand: Expand,
        meter: LogitMeter | None = None,
    ) -> None:
        super().__init__(function, document_function, args, parallel, meter)
        self._expand = expand

    def _attend(
        self, function: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Apply ``function`` to the queries and heads that this rank attends with, and to the keys of all tokens."""
        group, num_heads = self._parallel.head_group, query.shape[1] // self._parallel.head_group.size
        gathered = gather_from_context_region(_pack(key, value), self._parallel.context)  # [s, b, r_kv + d_r]
        query = scatter_heads_gather_sequence(query, group)
        heads: tuple[slice, ...] = ()
        if group.size > 1:
            heads = (slice(group.rank * num_heads, (group.rank + 1) * num_heads),)
        expand = partial(self._expand_rows, latent_size=key.shape[-1], heads=heads)
        if self._parallel.query_group.size > 1:
            context = self._attend_with_rebuilt_keys(function, query, gathered, expand)
        else:
            context = pad_heads(function)(query, *expand(gathered))  # [b, a/tc, s, d_v]
        return scatter_sequence_gather_heads(context, group)

    def _expand_rows(
        self, rows: torch.Tensor, *, latent_size: int, heads: tuple[slice, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the latents in ``rows``, for a slice of the heads or for all."""
        return self._expand(*_unpack(rows, latent_size), *heads)

    def _attend_with_rebuilt_keys(
        self,
        function: Callable[..., torch.Tensor],
        query: torch.Tensor,
        gathered: torch.Tensor,
        expand: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Apply ``function``; backward projects keys and values again from the ``gathered`` latents."""

        def expand_padded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
            keys, values = expand(rows)
            size = max(keys.shape[-1], values.shape[-1])
            return pad_head(keys, size), pad_head(values, size), values.shape[-1]

        keys, values, value_size = expand_padded(gathered)  # [b, a/tn, s, d], padded to equal sizes
        query = pad_head(query, keys.shape[-1])
        hooks = _RebuildHooks(lambda: expand_padded(gathered.detach())[:2], keys, values)
        with nullcontext() if self._is_recomputed else saved_tensors_hooks(hooks.pack, hooks.unpack):
            return function(query, keys, values)[..., :value_size]


def _pack(latent: torch.Tensor, rotated_key: torch.Tensor) -> torch.Tensor:
    """Return latents [b, 1, s, r_kv] and rotated keys [b, 1, s, d_r] as rows [s, b, r_kv + d_r]."""
    return torch.cat((latent, rotated_key), dim=-1).squeeze(1).transpose(0, 1).contiguous()


def _unpack(rows: torch.Tensor, latent_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latents [b, 1, s, r_kv] and rotated keys [b, 1, s, d_r] in ``rows`` [s, b, r_kv + d_r]."""
    by_sample = rows.transpose(0, 1).unsqueeze(1)
    return by_sample[..., :latent_size], by_sample[..., latent_size:]


class _RebuildHooks:
    """Saved-tensor hooks that rebuild keys and values of the full sequence in backward instead of saving them.

    A saved tensor that is a view of keys or values is replaced by an index, its shape, strides and offset. All other
    tensors are saved unchanged.

    Args:
        rebuild: returns keys and values again.
    """

    def __init__(
        self, rebuild: Callable[[], tuple[torch.Tensor, torch.Tensor]], keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        self._rebuild = rebuild
        self._indices = {tensor.untyped_storage().data_ptr(): idx for idx, tensor in enumerate((keys, values))}
        self._rebuilt: tuple[torch.Tensor, torch.Tensor] | None = None
        self._num_saved = 0

    def pack(self, x: torch.Tensor) -> Any:
        """Return the object saved for ``x``."""
        idx = self._indices.get(x.untyped_storage().data_ptr())
        if idx is None:
            return x
        self._num_saved += 1
        return idx, x.shape, x.stride(), x.storage_offset()

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return the tensor that was passed to ``pack``."""
        if isinstance(saved, torch.Tensor):
            return saved
        if self._rebuilt is None:
            with torch.no_grad():
                self._rebuilt = self._rebuild()
        idx, *view = saved
        tensor = self._rebuilt[idx].as_strided(*view)
        self._num_saved -= 1
        if self._num_saved <= 0:  # the last saved tensor: the returned view keeps the memory alive
            self._rebuilt = None
        return tensor

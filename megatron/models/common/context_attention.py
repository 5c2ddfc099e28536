"""Attention of this rank's queries to the keys of all ranks of the context group (--context-parallel-size)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.models.common.logit_meter import LogitMeter, wrap
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.context_parallel import (
    gather_from_context_region,
    gather_rows,
    scatter_heads_gather_sequence,
    scatter_sequence_gather_heads,
    token_ranges,
)
from megatron.mpu.groups import Group
from megatron.ops.attention import lower_right_attention


class ContextAttention:
    """Attention over the full sequence with context parallelism.

    | cp_comm_type | communicated | saved for backward |
    |---|---|---|
    | all_gather, p2p | all-gather keys and values, again in backward; reduce-scatter gradients | this rank's tokens |
    | a2a | all-to-all queries, keys, values and output | all tokens of 1/c of the heads |
    | a2a+p2p | a2a over the n ranks of the inner group, all_gather over the outer group | the inner group's tokens of \
    1/n of the heads |

    Shapes:
        query      [b, a/t, s/c, d]
        key, value [b, g/t, s/c, d]
        mask       from ``Masks``, or None for causal
        starts     int32 [b, s/c] or [b, s], document starts of the queries that this rank attends with
        output     [b, a/t, s/c, d]

    Args:
        function: attention function of ``megatron.ops``; accepts ``mask`` and the arguments for attention dropout.
        document_function: attention function for documents given by their starts: ``document_attention`` with its
            settings.
        meter: measures the logits; the functions are already wrapped by it.
    """

    def __init__(
        self,
        function: Callable[..., torch.Tensor],
        document_function: Callable[..., torch.Tensor],
        args: ModelArgs,
        parallel: ParallelContext,
        meter: LogitMeter | None = None,
    ) -> None:
        self._function, self._document_function, self._parallel = function, document_function, parallel
        self._causal_function = wrap(partial(lower_right_attention, scale=args.softmax_scale or None), meter)
        self._is_recomputed = args.checkpoint_activations or args.recompute_attention

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        drop: Callable[..., torch.Tensor] | None = None,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        heads, queries = self._parallel.head_group, self._parallel.query_group
        # each query applies its sink once, because one call sees its keys of all ranks
        sink_kwargs = {} if sinks is None else {"sinks": sinks}
        if drop is not None:
            if queries.size > 1:
                drop = partial(drop, runs=token_ranges(query.shape[2] * heads.size, queries))
            kwargs["drop"] = partial(drop, head_rank=heads.rank, head_ranks=heads.size) if heads.size > 1 else drop
        function: Callable[..., torch.Tensor] = partial(self._function, mask=mask, **sink_kwargs, **kwargs)
        if queries.size > 1 and mask is None and kwargs.get("is_causal") is not False:
            causal_function = self._causal_function if sinks is None else partial(self._function, **sink_kwargs)
            function = partial(self._attend_by_chunk, partial(causal_function, **kwargs))
        return self._attend(function, query, key, value)

    def attend_within_documents(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor,
        stops: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute attention within documents.

        A query attends to the keys from ``starts`` up to and including its own position. With ``stops``, it attends to
        the keys from ``starts`` up to and excluding ``stops``, which has the same shape.

        Args:
            kwargs: further arguments of the document function, such as the sinks of the heads this rank attends with.
        """
        function: Callable[..., torch.Tensor] = partial(self._document_function, **kwargs)
        if self._parallel.query_group.size == 1 or stops is not None:
            function = partial(function, starts=starts, stops=stops)
        else:
            function = partial(self._attend_by_chunk, function, starts=starts)
        return self._attend(function, query, key, value)

    def _attend(
        self, function: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Apply ``function`` to the queries and heads that this rank attends with, and to the keys of all tokens.

        After the exchange of tokens for heads, an inner group's rank has the tokens of two chunks again: those of its
        rank in the outer group, if the sequence is split over the outer group only.
        """
        group = self._parallel.head_group
        tensors = [scatter_heads_gather_sequence(x, group) for x in (query, key, value)]
        if self._parallel.query_group.size > 1:
            context = self._attend_with_gathered_keys(function, *tensors)
        else:
            context = function(*tensors)
        return scatter_sequence_gather_heads(context, group)

    def _attend_with_gathered_keys(
        self, function: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Apply ``function`` to this rank's queries and to the keys and values of all ranks."""
        key, value, saved_shard_hooks = _gather_keys_and_values(key, value, self._parallel.query_group)
        with nullcontext() if self._is_recomputed else saved_shard_hooks:
            return function(query, key, value)

    def _attend_by_chunk(
        self,
        function: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention for each of this rank's two chunks of queries and the keys up to the end of the chunk."""
        contexts = []
        for start, stop, first in token_ranges(query.shape[2], self._parallel.query_group):
            num_keys = first + stop - start
            inputs = query[:, :, start:stop], key[:, :, :num_keys], value[:, :, :num_keys]
            contexts.append(
                function(*inputs) if starts is None else function(*inputs, starts[:, start:stop], first=first)
            )
        return torch.cat(contexts, dim=2)


def _gather_keys_and_values(
    key: torch.Tensor, value: torch.Tensor, group: Group
) -> tuple[torch.Tensor, torch.Tensor, saved_tensors_hooks]:
    """Return keys and values of the full sequence, and hooks with which autograd saves only this rank's shard of them.

    Shapes:
        key, value [b, g/t, s/c, d]
        output     2 x [b, g/t, s, d]
    """
    shard = torch.stack((key, value)).permute(3, 0, 1, 2, 4).contiguous()  # [s/c, 2, b, g/t, d]
    gathered = gather_from_context_region(shard, group)  # [s, 2, b, g/t, d]
    hooks = _SavedShardHooks(shard.detach(), gathered.untyped_storage().data_ptr(), group)
    key, value = gathered.permute(1, 2, 3, 0, 4).unbind()
    return key, value, saved_tensors_hooks(hooks.pack, hooks.unpack)


class _SavedShardHooks:
    """Saved-tensor hooks that save only this rank's shard of rows gathered over ``group``; backward gathers them again.

    A saved tensor that is the gathered rows or a view of them is replaced by its shape, strides and offset. All other
    tensors are saved unchanged.

    Args:
        data_ptr: address of the gathered rows.
    """

    def __init__(self, shard: torch.Tensor, data_ptr: int, group: Group) -> None:
        self._shard, self._data_ptr, self._group = shard, data_ptr, group
        self._gathered: torch.Tensor | None = None
        self._num_saved = 0

    def pack(self, x: torch.Tensor) -> Any:
        """Return the object saved for ``x``."""
        if x.untyped_storage().data_ptr() != self._data_ptr:
            return x
        self._num_saved += 1
        return x.shape, x.stride(), x.storage_offset()

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return the tensor that was passed to ``pack``. Collective on the first call in a backward."""
        if isinstance(saved, torch.Tensor):
            return saved
        if self._gathered is None:
            self._gathered = gather_rows(self._shard, self._group)
        tensor = self._gathered.as_strided(*saved)
        self._num_saved -= 1
        if self._num_saved <= 0:  # the last saved tensor: the returned view keeps the memory alive
            self._gathered = None
        return tensor

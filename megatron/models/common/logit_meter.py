"""LogitMeter: measures the largest attention logit of each head of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.ops.attention_logits import raise_maxima
from megatron.ops.causal_attention import split_packed

AttentionFunction = Callable[..., torch.Tensor]


class LogitMeter:
    """Largest attention logits of one layer: ``q k^T`` times the softmax scale, before soft caps, biases and sinks.

    It wraps the attention functions of a layer and measures their queries and keys. With context parallelism, it wraps
    the functions that receive the exchanged tensors. A backward pass, which may recompute forwards, is not measured.

    Args:
        scale: factor of the scores.
        window: number of preceding keys that a query sees; 0: all.

    Attributes:
        maxima: [a/t], the running maxima over forwards; None while nothing is measured.
    """

    def __init__(self, args: ModelArgs, parallel: ParallelContext, *, scale: float, window: int) -> None:
        self._is_bound, self._parallel = args.qk_clip_bound, parallel
        self._scale, self._window = scale, window
        self.maxima: torch.Tensor | None = None

    def wrap(self, function: AttentionFunction) -> AttentionFunction:
        """Wrap an attention function of ``megatron.ops`` that takes queries, keys and values."""

        def attend(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self._measure(query, key, *args[1:2], **kwargs)
            return function(query, key, *args, **kwargs)

        return attend

    def wrap_packed(self, function: AttentionFunction) -> AttentionFunction:
        """Wrap ``causal_self_attention``, which takes queries, keys and values in one tensor."""

        def attend(packed: torch.Tensor, starts: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
            query, key, _ = split_packed(packed)
            self._measure(query, key, starts)
            return function(packed, starts, **kwargs)

        return attend

    def _measure(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        starts: torch.Tensor | None = None,
        *,
        mask: torch.Tensor | None = None,
        first: int | None = None,
        **_: Any,
    ) -> None:
        """Update ``maxima`` by the logits of one call of an attention function, given the arguments of the call."""
        if self.maxima is None:
            return
        if first is None:  # without document starts, the queries are the last positions of the keys
            first = 0 if starts is not None else key.shape[2] - query.shape[2]
        positions = None
        if self._is_bound and mask is None:
            positions = torch.arange(first, first + query.shape[2], device=query.device)
        elif self._is_bound:
            positions = self._parallel.query_positions(key.shape[2], query.device)
        window = 0 if starts is None else self._window  # without starts, the mask hides keys outside of the window
        first_head = self._parallel.head_group.rank * query.shape[1]
        raise_maxima(self.maxima, query, key, mask, starts, positions, first, window, self._scale, first_head)


def wrap(function: AttentionFunction, meter: LogitMeter | None) -> AttentionFunction:
    """Return ``function``, measured by ``meter`` if there is one."""
    return function if meter is None else meter.wrap(function)

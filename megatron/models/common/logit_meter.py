"""LogitMeter: measures the largest attention logit of each head of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.ops.attention_logits import logit_bounds, max_logits
from megatron.ops.causal_attention import split_packed
from tds.backward_state import is_running

AttentionFunction = Callable[..., torch.Tensor]


class LogitMeter:
    """Largest attention logits of one layer: ``q k^T`` times the softmax scale, before soft caps, biases and sinks.

    It wraps the attention functions of a layer, with context parallelism those that receive the exchanged tensors, and
    measures their queries and keys. Recomputation in backward is not measured again.

    Args:
        scale: factor of the scores.
        window: number of preceding keys that a query sees; 0: all.

    Attributes:
        maxima: [a/t], raised to the logits of each forward; None while nothing is measured.
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

    @torch.compiler.disable  # graphs do not change ``maxima``
    @torch.no_grad()
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
        """Raise ``maxima`` to the logits of one call of an attention function, which has the same arguments."""
        if self.maxima is None or is_running():
            return
        if first is None:  # without document starts, the queries are the last positions of the keys
            first = 0 if starts is not None else key.shape[2] - query.shape[2]
        if not self._is_bound:
            window = 0 if starts is None else self._window  # otherwise the mask has the window
            logits = max_logits(
                query, key, scale=self._scale, mask=mask, starts=starts, first=first, window=window
            )  # [a/t], or [a/tc] with sharded heads
        else:
            positions = (
                torch.arange(first, first + query.shape[2], device=query.device)
                if mask is None
                else self._parallel.query_positions(key.shape[2], query.device)
            )
            logits = logit_bounds(query, key, positions, scale=self._scale)
        first_head = self._parallel.context.rank * len(logits) if self._parallel.has_sharded_heads else 0
        maxima = self.maxima[first_head : first_head + len(logits)]
        torch.maximum(maxima, logits.to(maxima.dtype), out=maxima)


def wrap(function: AttentionFunction, meter: LogitMeter | None) -> AttentionFunction:
    """Return ``function``, measured by ``meter`` if there is one."""
    return function if meter is None else meter.wrap(function)

"""The smallest recurrent mixer, for tests of the layers around it: a state that decays by half from token to token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn

from megatron.models.common import recurrent_mixers
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.recurrent_cache import RecurrentCache
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear

DECAY = 0.5


class DecayMixer(nn.Module):
    """``y_i = dense(S_i)`` with ``S_i = S_{i-1} / 2 + value(x_i)``; the state is 0 at the start of a document.

    Shapes and arguments: as in ``megatron.models.common.recurrent_mixers``.
    """

    def __init__(self, args: ModelArgs, parallel: ParallelContext, layer: int) -> None:
        super().__init__()
        h = args.hidden_size
        self.value = ColumnParallelLinear(h, h, bias=False, **parallel.layer_kwargs)
        self.dense = RowParallelLinear(h, h, bias=False, **parallel.layer_kwargs)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, cache: RecurrentCache | None = None,
        positions: torch.Tensor | None = None, starts: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        assert mask is None
        values = self.value(x)  # [s, b, h/t]
        state = torch.zeros_like(values[0]) if cache is None or cache.state is None else cache.state
        is_padding = None if cache is None else cache.is_padding(len(values))
        states = []
        for idx, value in enumerate(values):
            if starts is not None:
                state = state.masked_fill((starts[:, idx] == idx).unsqueeze(1), 0.0)
            following = DECAY * state + value
            state = following if is_padding is None else torch.where(is_padding[:, idx, None], state, following)
            states.append(state)
        if cache is not None:
            cache.state = state
        return self.dense(torch.stack(states))


@contextmanager
def every_recurrent_mixer_decays() -> Iterator[None]:
    """Replace all recurrent mixers by ``DecayMixer`` in the block."""
    with patch.dict(recurrent_mixers.MIXERS, dict.fromkeys(recurrent_mixers.MIXERS, DecayMixer)):
        yield

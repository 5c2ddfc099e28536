"""The recurrent mixers of hybrid decoders.

All mixers have the same interface. A mixer is constructed with (args, parallel, layer index), and called with

| argument | value |
|---|---|
| x | [s, b, h], or this rank's shard of the sequence, depending on ``parallel`` |
| mask | None: the mixer is causal by construction |
| cache | ``RecurrentCache``, or None in training |
| positions | rotary positions, which mixers ignore |
| starts | int32 [b, s], document starts of the full sequence over all context ranks; None: one document |

It returns an output with the shape of x. Its output projection is called ``dense``, as in attention. With a cache, the
mixer continues from the cached state. A token reads neither the state nor the convolution inputs of other documents.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron.config.layer_types import GATED_DELTA_NET, KIMI_DELTA, MAMBA2
from megatron.models.common.gated_delta_net import GatedDeltaNet
from megatron.models.common.kimi_delta import KimiDeltaAttention
from megatron.models.common.mamba2 import Mamba2
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext

MIXERS: dict[str, Any] = {GATED_DELTA_NET: GatedDeltaNet, KIMI_DELTA: KimiDeltaAttention, MAMBA2: Mamba2}
"""Mixer -> its class."""


def make_recurrent_mixer(mixer: str, args: ModelArgs, parallel: ParallelContext, layer: int) -> nn.Module:
    """Build the recurrent mixer of one layer.

    Args:
        mixer: a key of ``MIXERS``.
        layer: index of the layer in the full model, from 0.
    """
    module: nn.Module = MIXERS[mixer](args, parallel, layer)
    return module

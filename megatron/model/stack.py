"""A run of transformer layers, recomputed in backward where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.mpu.random import DropoutStreams, checkpoint


def run_layers(
    layers: Sequence[Callable[..., torch.Tensor]],
    x: torch.Tensor,
    *others: Any,
    streams: DropoutStreams,
    recompute_every: int = 0,
) -> torch.Tensor:
    """Return ``x`` after all ``layers``.

    Args:
        others: what every layer takes besides, such as a mask.
        recompute_every: keep only the input of each run of so many layers and recompute the rest in backward;
            0 keeps all activations.
    """

    def run(part: Sequence[Callable[..., torch.Tensor]], x: torch.Tensor, *others: Any) -> torch.Tensor:
        for layer in part:
            x = layer(x, *others)
        return x

    if not recompute_every or not torch.is_grad_enabled():
        return run(layers, x, *others)
    for start in range(0, len(layers), recompute_every):
        x = checkpoint(streams, run, layers[start : start + recompute_every], x, *others)
    return x

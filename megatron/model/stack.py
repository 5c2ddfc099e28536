"""A run of transformer layers, recomputed in backward where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megatron.model.recompute import Recompute


def run_layers(
    layers: Sequence[Callable[..., torch.Tensor]], x: torch.Tensor, *others: Any, recompute: Recompute
) -> torch.Tensor:
    """Return ``x`` after all ``layers``.

    Args:
        others: what every layer takes besides, such as a mask.
        recompute: runs each ``recompute.every`` layers, of which backward then has the input only.
    """

    def run(part: Sequence[Callable[..., torch.Tensor]], x: torch.Tensor, *others: Any) -> torch.Tensor:
        for layer in part:
            x = layer(x, *others)
        return x

    every = recompute.every
    if not every or not torch.is_grad_enabled():
        return run(layers, x, *others)
    for start in range(0, len(layers), every):
        x = recompute(partial(run, layers[start : start + every]), x, *others)
    return x

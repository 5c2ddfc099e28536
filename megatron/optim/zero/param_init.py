"""ParamInit: weights that are initialized one by one, so that no device holds the full model.

| | on the host | on the device |
|---|---|---|
| before a weight is adopted | its shape alone, or the values that its module has set | nothing |
| meanwhile | its values | its parts |
| from then on | nothing | its parts, and one number, NaN, that stands for the others |

A weight that is not cut (a single number) goes to the device whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron import device


@dataclass(frozen=True)
class ParamInit:
    """Where weights go, and how they get their values.

    Args:
        device: where the model is trained.
        fill: gives a weight its values, on the host, the same on all replicas. Collective over them.
    """

    device: torch.device
    fill: Callable[[torch.nn.Parameter], None]

    def come(self, parameter: torch.nn.Parameter, *, is_cut: bool) -> None:
        """Have the values of ``parameter`` on the host, or where it is trained, if no replica cuts it."""
        self.fill(parameter)
        if not is_cut:
            device.give(parameter, parameter.detach().to(self.device))

    def leave(self, parameter: torch.nn.Parameter) -> None:
        """Forget the values of ``parameter``, of which its parts have been taken."""
        nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=self.device)
        device.give(parameter, nothing.expand(parameter.shape))

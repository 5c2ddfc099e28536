"""ParamInit: initializes weights one by one under ZeRO 3, so that no device ever holds the full model.

| | on the host | on the device |
|---|---|---|
| before a weight is registered | its shape only, or the values that its module has set | nothing |
| while it is registered | its values | its shard |
| afterwards | nothing | its shard, and a single NaN expanded to the weight's shape |

A weight that is not sharded (a scalar) is moved to the device in full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron import device


@dataclass(frozen=True)
class ParamInit:
    """Initialization of weights, one by one.

    Args:
        device: device of the model.
        fill: initializes a weight on the host, equally on all replicas. Collective.
    """

    device: torch.device
    fill: Callable[[torch.nn.Parameter], None]

    def materialize(self, parameter: torch.nn.Parameter, *, is_sharded: bool) -> None:
        """Initialize ``parameter``, on the host if it is sharded, otherwise on the device."""
        self.fill(parameter)
        if not is_sharded:
            device.replace_data(parameter, parameter.detach().to(self.device))

    def release(self, parameter: torch.nn.Parameter) -> None:
        """Free the values after the shard has been copied."""
        nan = torch.full((), torch.nan, dtype=parameter.dtype, device=self.device)
        device.replace_data(parameter, nan.expand(parameter.shape))

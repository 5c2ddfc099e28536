"""DeepSpeed's AdamW for weights on the CPU, compiled on this machine when it is first used."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from megatron.errors import ConfigError


def deepspeed_adam(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """Return DeepSpeedCPUAdam over ``groups``; ``settings`` as of ``torch.optim.AdamW``.

    Raises:
        ConfigError: it cannot be compiled here.
    """
    try:
        return DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
    except Exception as error:  # whatever the compiler, its loader or their files say
        raise ConfigError(
            f"--cpu-adam deepspeed compiles an extension, which failed here: {type(error).__name__}: {error}. It needs "
            "a C++ compiler (g++) and ninja. Use --cpu-adam torch, which needs none"
        ) from error

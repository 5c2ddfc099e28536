"""Tell DeepSpeed which device to use before it is imported: later it has chosen for itself, and says so."""

from __future__ import annotations

import os

from megatron import device
from megatron.config import Config
from megatron.errors import ConfigError
from megatron.training import determinism


def settle(config: Config) -> str:
    """Choose the kind of device, and whether it repeats itself to the bit, and return the kind.

    Raises:
        ConfigError: --device asks for one that is not there, or --deterministic cannot be held.
    """
    try:
        kind = device.choose(config.parallel.device)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    os.environ["DS_ACCELERATOR"] = kind
    determinism.settle(config, kind)
    return kind

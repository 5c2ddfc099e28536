"""Tell DeepSpeed which device to use before it is imported: later it has chosen for itself, and says so."""

from __future__ import annotations

import os

from megatron import device
from megatron.config import Config
from megatron.errors import ConfigError


def settle(config: Config) -> str:
    """Choose the kind of device and return it.

    Raises:
        ConfigError: --device asks for one that is not there.
    """
    try:
        kind = device.choose(config.parallel.device)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    os.environ["DS_ACCELERATOR"] = kind
    return kind

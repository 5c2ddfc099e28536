"""The training loop and what it stands on: ``pretrain`` and the names that ported scripts expect.

Names resolve on first use, so that --help and --dry-run need neither torch nor DeepSpeed.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "pretrain": "entrypoint",
    "get_args": "global_vars",
    "get_config": "global_vars",
    "get_data_paths": "global_vars",
    "get_tokenizer": "global_vars",
    "get_streams": "global_vars",
    "configure_device": "device_setup",
    "start": "trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'megatron.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"megatron.training.{_HOME[name]}"), name)

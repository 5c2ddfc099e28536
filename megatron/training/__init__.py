"""The training loop and what it stands on: ``pretrain`` and the names that ported scripts expect.

Names resolve on first use, so that --help and --dry-run need neither torch nor DeepSpeed.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "pretrain": "entry",
    "get_args": "arguments",
    "get_config": "arguments",
    "get_data_paths": "arguments",
    "get_tokenizer": "arguments",
    "get_streams": "arguments",
    "configure_device": "accelerator",
    "start": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'megatron.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"megatron.training.{_HOME[name]}"), name)

"""Pretraining of language models with data x tensor x pipeline parallelism.

``from megatron import get_args, get_tokenizer, mpu`` works as ported scripts expect; names resolve on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_TRAINING = ("get_args", "get_config", "get_tokenizer")


def __getattr__(name: str) -> Any:
    if name not in _TRAINING:
        raise AttributeError(f"module 'megatron' has no attribute {name!r}")
    return getattr(importlib.import_module("megatron.training"), name)

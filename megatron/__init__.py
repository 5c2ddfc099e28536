"""Pretraining of language models with data, tensor and pipeline parallelism.

``from megatron import get_args, get_tokenizer, mpu`` works as in Megatron-LM. Names are imported on first use.
"""

from __future__ import annotations

from typing import Any

from megatron import environment
from tds.lazy_imports import lazy_attribute

_MODULES = {
    "get_args": "megatron.training.global_vars",
    "get_config": "megatron.training.global_vars",
    "get_tokenizer": "megatron.training.global_vars",
}
environment.install()


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, name, _MODULES)

"""Frozen configuration dataclasses, whose fields define the flags. Uses the standard library only."""

from __future__ import annotations

import importlib
from typing import Any

from megatron.config.batch import BatchConfig as BatchConfig
from megatron.config.checkpoint import CheckpointConfig as CheckpointConfig
from megatron.config.config import Config as Config
from megatron.config.data import DataConfig as DataConfig
from megatron.config.debug import DebugConfig as DebugConfig
from megatron.config.family import FamilyConfig as FamilyConfig
from megatron.config.family import ModelFamily as ModelFamily
from megatron.config.model import ModelConfig as ModelConfig
from megatron.config.optimizer import OptimizerConfig as OptimizerConfig
from megatron.config.optimizer import PrecisionConfig as PrecisionConfig
from megatron.config.parallel import ParallelConfig as ParallelConfig
from megatron.config.run import RunConfig as RunConfig

_MOVED = {
    "parse": "megatron.arguments.parser",
    "engine_dict": "megatron.arguments.deepspeed_json",
    "check_device": "megatron.arguments.validate",
    "resolve_dtype": "megatron.arguments.validate",
    "BertConfig": "megatron.models.bert.config",
    "LlamaConfig": "megatron.models.llama.config",
    "MptConfig": "megatron.models.mpt.config",
    "T5Config": "megatron.models.t5.config",
}
"""Name that older scripts import from ``megatron.config`` -> the module that now defines it."""


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module 'megatron.config' has no attribute {name!r}")
    return getattr(importlib.import_module(_MOVED[name]), name)

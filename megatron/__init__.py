"""Pretraining of language models with data x tensor x pipeline parallelism.

``from megatron import get_args, get_tokenizer, mpu`` works as ported scripts expect; names resolve on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron import environment
from tds.deprecated_paths import forward

_TRAINING = ("get_args", "get_config", "get_tokenizer")
MOVED = {
    "megatron.adaptors": ("megatron.accelerators",),
    "megatron.cost": (
        "megatron.models.registry:of=costs_of",
        "megatron.models.common.cost",
        "megatron.models.common.memory",
        "megatron.models.common.decoder_cost:GPT2Costs=DecoderCosts",
        "megatron.models.common.decoder_cost",
        "megatron.models.t5.cost",
    ),
    "megatron.model": (
        "megatron.models:BertSizes=BertModelArgs",
        "megatron.models:Place=ParallelContext",
        "megatron.models:Sizes=ModelArgs",
        "megatron.models:T5Sizes=T5ModelArgs",
        "megatron.models:bert_sizes_from=bert_model_args_from",
        "megatron.models:sizes_from=model_args_from",
        "megatron.models:t5_sizes_from=t5_model_args_from",
        "megatron.models",
    ),
    "megatron.pipe": ("megatron.models",),
    "megatron.training.checkpointing": ("megatron.training.callbacks.checkpointer",),
    "megatron.training.debugging": ("megatron.training.callbacks.debugger",),
    "megatron.training.evaluate": ("megatron.training.trainer", "megatron.training.callbacks.evaluator"),
    "megatron.training.metrics": (
        "megatron.training.callbacks.metrics_writer",
        "megatron.training.callbacks.layer_norms",
        "megatron.training.callbacks.straggler",
        "megatron.training.callbacks.wandb",
    ),
    "megatron.training.profiler": ("megatron.training.callbacks.profiler",),
    "megatron.training.replica_check": ("megatron.training.callbacks.replica_check",),
    "megatron.training.stability_guard": ("megatron.training.callbacks.stability_guard",),
    "megatron.training.training_log": ("megatron.training.callbacks.speed_monitor",),
    "megatron.stages": ("tds.schedule.simulate", "tds.partition", "megatron.models.t5.config"),
}
"""Former modules that pages or scripts name, for one release -> where their names are now."""
forward(MOVED)
environment.install()


def __getattr__(name: str) -> Any:
    if f"megatron.{name}" in MOVED:
        return importlib.import_module(f"megatron.{name}")
    if name not in _TRAINING:
        raise AttributeError(f"module 'megatron' has no attribute {name!r}")
    return getattr(importlib.import_module("megatron.training"), name)

"""Pretraining of language models with data x tensor x pipeline parallelism.

``from megatron import get_args, get_tokenizer, mpu`` works as ported scripts expect; names resolve on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

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
        "megatron.models:LlamaSizes=LlamaModelArgs",
        "megatron.models:MptSizes=MptModelArgs",
        "megatron.models:Place=ParallelContext",
        "megatron.models:Sizes=ModelArgs",
        "megatron.models:T5Sizes=T5ModelArgs",
        "megatron.models:bert_sizes_from=bert_model_args_from",
        "megatron.models:llama_sizes_from=llama_model_args_from",
        "megatron.models:mpt_sizes_from=mpt_model_args_from",
        "megatron.models:sizes_from=model_args_from",
        "megatron.models:t5_sizes_from=t5_model_args_from",
        "megatron.models",
    ),
    "megatron.pipe": ("megatron.models",),
    "megatron.stages": ("tds.schedule.simulate", "tds.partition", "megatron.models.t5.config"),
}
"""Former modules that pages or scripts name, for one release -> where their names are now."""
forward(MOVED)


def __getattr__(name: str) -> Any:
    if f"megatron.{name}" in MOVED:
        return importlib.import_module(f"megatron.{name}")
    if name not in _TRAINING:
        raise AttributeError(f"module 'megatron' has no attribute {name!r}")
    return getattr(importlib.import_module("megatron.training"), name)

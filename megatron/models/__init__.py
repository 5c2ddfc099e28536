"""The families of models: a folder each, a line each in ``registry``, and what they share in ``common``.

Sections of the families come with the import, without torch; models and pipelines are found on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron.models.bert.config import BertConfig as BertConfig
from megatron.models.gpt2.config import GPT2Config as GPT2Config
from megatron.models.llama.config import LlamaConfig as LlamaConfig
from megatron.models.mpt.config import MptConfig as MptConfig
from megatron.models.registry import costs_of as costs_of
from megatron.models.registry import register as register
from megatron.models.t5.config import T5Config as T5Config

_HOME = {
    "BertModel": "megatron.models.bert.model",
    "BertSizes": "megatron.models.bert.model",
    "bert_sizes_from": "megatron.models.bert.model",
    "GPT2Model": "megatron.models.common.decoder",
    "T5Model": "megatron.models.t5.model",
    "LlamaModel": "megatron.models.llama.model",
    "MptModel": "megatron.models.mpt.model",
    "Sizes": "megatron.models.common.decoder_cost",
    "T5Sizes": "megatron.models.t5.layers",
    "LlamaSizes": "megatron.models.llama.model",
    "MptSizes": "megatron.models.mpt.model",
    "Place": "megatron.models.common.model_args",
    "recompute_switches": "megatron.models.common.transformer",
    "sizes_from": "megatron.models.common.model_args",
    "t5_sizes_from": "megatron.models.t5.model",
    "llama_sizes_from": "megatron.models.llama.model",
    "mpt_sizes_from": "megatron.models.mpt.model",
    "GPT2ModelPipe": "megatron.models.common.pipeline",
    "T5ModelPipe": "megatron.models.t5.pipeline",
    "BertModelPipe": "megatron.models.bert.pipeline",
    "LlamaModelPipe": "megatron.models.llama.pipeline",
    "MptModelPipe": "megatron.models.mpt.pipeline",
    "pipe_topology": "megatron.models.common.pipeline",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)

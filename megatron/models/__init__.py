"""Model families: one folder per family, a table of families in ``registry``, and shared code in ``common``.

The families' configuration sections are imported here, without torch; models and pipelines are imported on first use.
"""

from __future__ import annotations

from typing import Any

from megatron.models.bert.config import BertConfig as BertConfig
from megatron.models.gpt2.config import GPT2Config as GPT2Config
from megatron.models.llama.config import LlamaConfig as LlamaConfig
from megatron.models.mpt.config import MptConfig as MptConfig
from megatron.models.registry import costs_of as costs_of
from megatron.models.registry import register as register
from megatron.models.t5.config import T5Config as T5Config
from tds.lazy_imports import lazy_attribute

_MODULES = {
    "BertModel": "megatron.models.bert.model",
    "BertModelArgs": "megatron.models.bert.model",
    "bert_model_args_from": "megatron.models.bert.model",
    "DecoderModel": "megatron.models.common.decoder",
    "T5Model": "megatron.models.t5.model",
    "ModelArgs": "megatron.models.common.model_args",
    "T5ModelArgs": "megatron.models.t5.layers",
    "ParallelContext": "megatron.models.common.parallel_context",
    "recompute_switches": "megatron.models.common.transformer",
    "model_args_from": "megatron.models.common.model_args",
    "t5_model_args_from": "megatron.models.t5.model",
    "DecoderPipe": "megatron.models.common.pipeline",
    "T5ModelPipe": "megatron.models.t5.pipeline",
    "BertModelPipe": "megatron.models.bert.pipeline",
    "pipe_topology": "megatron.models.common.pipeline",
}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, name, _MODULES)

"""The families of models: a folder each, a line each in ``registry``, and what they share in ``common``.

Sections of the families come with the import, without torch; models and pipelines are found on first use.
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
from tds.deprecated_paths import look_up

_HOME = {
    "BertModel": "megatron.models.bert.model",
    "BertModelArgs": "megatron.models.bert.model",
    "bert_model_args_from": "megatron.models.bert.model",
    "DecoderModel": "megatron.models.common.decoder",
    "T5Model": "megatron.models.t5.model",
    "ModelArgs": "megatron.models.common.model_args",
    "T5ModelArgs": "megatron.models.t5.layers",
    "ParallelContext": "megatron.models.common.model_args",
    "recompute_switches": "megatron.models.common.transformer",
    "model_args_from": "megatron.models.common.model_args",
    "t5_model_args_from": "megatron.models.t5.model",
    "DecoderPipe": "megatron.models.common.pipeline",
    "T5ModelPipe": "megatron.models.t5.pipeline",
    "BertModelPipe": "megatron.models.bert.pipeline",
    "pipe_topology": "megatron.models.common.pipeline",
}


_FORMER = {
    "BertSizes": "megatron.models.bert.model.BertModelArgs",
    "GPT2Model": "megatron.models.common.decoder.DecoderModel",
    "GPT2ModelPipe": "megatron.models.common.pipeline.DecoderPipe",
    "LlamaModel": "megatron.models.common.decoder.DecoderModel",
    "LlamaModelPipe": "megatron.models.common.pipeline.DecoderPipe",
    "MptModel": "megatron.models.common.decoder.DecoderModel",
    "MptModelPipe": "megatron.models.common.pipeline.DecoderPipe",
    "Place": "megatron.models.common.model_args.ParallelContext",
    "Sizes": "megatron.models.common.model_args.ModelArgs",
    "T5Sizes": "megatron.models.t5.layers.T5ModelArgs",
    "bert_sizes_from": "megatron.models.bert.model.bert_model_args_from",
    "sizes_from": "megatron.models.common.model_args.model_args_from",
    "t5_sizes_from": "megatron.models.t5.model.t5_model_args_from",
}
"""Names that were here -> what they are now, for one release."""


def __getattr__(name: str) -> Any:
    return look_up(__name__, name, _FORMER, _HOME)

"""Token files, samples in a computed order, and the micro-batches of a replica.

Names are resolved on first use, so that preprocessing does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.data.batches import ReplicaBatches
    from megatron.data.bert_control import BertTokens, bert_tokens
    from megatron.data.bert_layout import bert_fields
    from megatron.data.bert_samples import BertSamples
    from megatron.data.build import build_train_valid_test
    from megatron.data.build_bert import build_bert_train_valid_test
    from megatron.data.build_t5 import build_t5_train_valid_test
    from megatron.data.cache import Cache
    from megatron.data.control_tokens import T5Tokens, t5_tokens
    from megatron.data.corpora import DataPaths
    from megatron.data.fields import gpt2_fields, t5_fields
    from megatron.data.fim import Fim, fim_from
    from megatron.data.gpt2_samples import GPT2Samples
    from megatron.data.mixed_samples import MixedSamples
    from megatron.data.mixture import SampleOrder
    from megatron.data.mixture_resume import resumed_order
    from megatron.data.span_file_samples import SpanFileSamples
    from megatron.data.span_files import SpanFiles
    from megatron.data.split import split_by_hash, split_documents
    from megatron.data.t5_samples import T5Samples
    from megatron.data.token_file import TokenFile
    from megatron.data.token_writer import TokenFileWriter

_MODULES = {
    "BertSamples": "bert_samples",
    "BertTokens": "bert_control",
    "Cache": "cache",
    "DataPaths": "corpora",
    "Fim": "fim",
    "fim_from": "fim",
    "MixedSamples": "mixed_samples",
    "ReplicaBatches": "batches",
    "SampleOrder": "mixture",
    "SpanFiles": "span_files",
    "SpanFileSamples": "span_file_samples",
    "T5Samples": "t5_samples",
    "T5Tokens": "control_tokens",
    "bert_fields": "bert_layout",
    "bert_tokens": "bert_control",
    "build_bert_train_valid_test": "build_bert",
    "build_t5_train_valid_test": "build_t5",
    "build_train_valid_test": "build",
    "GPT2Samples": "gpt2_samples",
    "gpt2_fields": "fields",
    "resumed_order": "mixture_resume",
    "split_by_hash": "split",
    "split_documents": "split",
    "t5_fields": "fields",
    "t5_tokens": "control_tokens",
    "TokenFile": "token_file",
    "TokenFileWriter": "token_writer",
}

__all__ = [
    "BertSamples",
    "BertTokens",
    "Cache",
    "DataPaths",
    "Fim",
    "GPT2Samples",
    "MixedSamples",
    "ReplicaBatches",
    "SampleOrder",
    "SpanFileSamples",
    "SpanFiles",
    "T5Samples",
    "T5Tokens",
    "TokenFile",
    "TokenFileWriter",
    "bert_fields",
    "bert_tokens",
    "build_bert_train_valid_test",
    "build_t5_train_valid_test",
    "build_train_valid_test",
    "fim_from",
    "gpt2_fields",
    "resumed_order",
    "split_by_hash",
    "split_documents",
    "t5_fields",
    "t5_tokens",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

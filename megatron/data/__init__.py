"""Token files, samples in a computed order, and the micro-batches of a replica.

Names are resolved on first use, so that preprocessing does not import torch.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.data.batches import ReplicaBatches
    from megatron.data.build import build_train_valid_test
    from megatron.data.cache import Cache
    from megatron.data.corpora import DataPaths
    from megatron.data.fields import gpt2_fields
    from megatron.data.fim import Fim, fim_from
    from megatron.data.gpt2_samples import GPT2Samples
    from megatron.data.mixed_samples import MixedSamples
    from megatron.data.mixture import SampleOrder
    from megatron.data.mixture_resume import resumed_order
    from megatron.data.split import split_by_hash, split_documents
    from megatron.data.token_file import TokenFile
    from megatron.data.token_writer import TokenFileWriter

_MODULES = {
    "Cache": "cache",
    "DataPaths": "corpora",
    "Fim": "fim",
    "fim_from": "fim",
    "MixedSamples": "mixed_samples",
    "ReplicaBatches": "batches",
    "SampleOrder": "mixture",
    "build_train_valid_test": "build",
    "GPT2Samples": "gpt2_samples",
    "gpt2_fields": "fields",
    "resumed_order": "mixture_resume",
    "split_by_hash": "split",
    "split_documents": "split",
    "TokenFile": "token_file",
    "TokenFileWriter": "token_writer",
}

_OF_FAMILIES: dict[str, str] = {
    "BertSamples": "megatron.data.bert_samples.BertSamples",
    "BertTokens": "megatron.data.bert_control.BertTokens",
    "SpanFiles": "megatron.data.span_files.SpanFiles",
    "SpanFileSamples": "megatron.data.span_file_samples.SpanFileSamples",
    "T5Samples": "megatron.data.t5_samples.T5Samples",
    "T5Tokens": "megatron.data.control_tokens.T5Tokens",
    "bert_fields": "megatron.data.bert_layout.bert_fields",
    "bert_tokens": "megatron.data.bert_control.bert_tokens",
    "build_bert_train_valid_test": "megatron.data.build_bert.build_bert_train_valid_test",
    "build_t5_train_valid_test": "megatron.data.build_t5.build_t5_train_valid_test",
    "t5_fields": "megatron.data.fields.t5_fields",
    "t5_tokens": "megatron.data.control_tokens.t5_tokens",
}
"""Names of BERT and T5 that were here -> where they are."""

__all__ = [
    "Cache",
    "DataPaths",
    "Fim",
    "GPT2Samples",
    "MixedSamples",
    "ReplicaBatches",
    "SampleOrder",
    "TokenFile",
    "TokenFileWriter",
    "build_train_valid_test",
    "fim_from",
    "gpt2_fields",
    "resumed_order",
    "split_by_hash",
    "split_documents",
]


def __getattr__(name: str) -> Any:
    if name in _OF_FAMILIES:
        home, _, its_name = _OF_FAMILIES[name].rpartition(".")
        warnings.warn(f"megatron.data.{name} is {home}.{its_name} now", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(home), its_name)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

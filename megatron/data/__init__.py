"""Token files, samples in a computed order, and the micro-batches of a replica.

Names are resolved on first use, so that preprocessing does not import torch.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.data.blended_dataset import MixedSamples, SampleOrder, resumed_order
    from megatron.data.cache import Cache
    from megatron.data.data_loader import ReplicaBatches
    from megatron.data.dataset_builder import DataPaths
    from megatron.data.gpt_dataset import Fim, GPT2Samples, build_train_valid_test, fim_from, gpt2_fields
    from megatron.data.indexed_dataset import TokenFile
    from megatron.data.indexed_dataset_builder import TokenFileWriter
    from megatron.data.split import split_by_hash, split_documents

_MODULES = {
    "Cache": "cache",
    "DataPaths": "dataset_builder",
    "Fim": "gpt_dataset",
    "fim_from": "gpt_dataset",
    "MixedSamples": "blended_dataset",
    "ReplicaBatches": "data_loader",
    "SampleOrder": "blended_dataset",
    "build_train_valid_test": "gpt_dataset",
    "GPT2Samples": "gpt_dataset",
    "gpt2_fields": "gpt_dataset",
    "resumed_order": "blended_dataset",
    "split_by_hash": "split",
    "split_documents": "split",
    "TokenFile": "indexed_dataset",
    "TokenFileWriter": "indexed_dataset_builder",
}

_OF_FAMILIES: dict[str, str] = {
    "BertSamples": "megatron.models.bert.data.BertSamples",
    "BertTokens": "megatron.models.bert.data.BertTokens",
    "SpanFiles": "megatron.models.t5.span_files.SpanFiles",
    "SpanFileSamples": "megatron.models.t5.span_files.SpanFileSamples",
    "T5Samples": "megatron.models.t5.data.T5Samples",
    "T5Tokens": "megatron.models.t5.data.T5Tokens",
    "bert_fields": "megatron.models.bert.model.bert_fields",
    "bert_tokens": "megatron.models.bert.data.bert_tokens",
    "build_bert_train_valid_test": "megatron.models.bert.data.build_bert_train_valid_test",
    "build_t5_train_valid_test": "megatron.models.t5.span_files.build_t5_train_valid_test",
    "t5_fields": "megatron.models.t5.model.t5_fields",
    "t5_tokens": "megatron.models.t5.data.t5_tokens",
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

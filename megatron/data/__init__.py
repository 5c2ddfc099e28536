"""Token files, samples in a computed order, and the micro-batches of a replica.

Names are resolved on first use, so that preprocessing does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tds.deprecated_paths import look_up

if TYPE_CHECKING:
    from megatron.data.blended_dataset import BlendedDataset, BlendSchedule, resumed_order
    from megatron.data.cache import IndexCache
    from megatron.data.data_loader import DataLoader
    from megatron.data.dataset_builder import BlendPaths
    from megatron.data.gpt_dataset import Fim, GPTDataset, build_train_valid_test, fim_from, gpt2_fields
    from megatron.data.indexed_dataset import IndexedDataset
    from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder
    from megatron.data.sft_dataset import SFTDataset, build_sft_train_valid_test
    from megatron.data.split import split_by_hash, split_documents

_MODULES = {
    "IndexCache": "megatron.data.cache",
    "BlendPaths": "megatron.data.dataset_builder",
    "Fim": "megatron.data.gpt_dataset",
    "fim_from": "megatron.data.gpt_dataset",
    "BlendedDataset": "megatron.data.blended_dataset",
    "DataLoader": "megatron.data.data_loader",
    "BlendSchedule": "megatron.data.blended_dataset",
    "build_sft_train_valid_test": "megatron.data.sft_dataset",
    "build_train_valid_test": "megatron.data.gpt_dataset",
    "GPTDataset": "megatron.data.gpt_dataset",
    "SFTDataset": "megatron.data.sft_dataset",
    "gpt2_fields": "megatron.data.gpt_dataset",
    "resumed_order": "megatron.data.blended_dataset",
    "split_by_hash": "megatron.data.split",
    "split_documents": "megatron.data.split",
    "IndexedDataset": "megatron.data.indexed_dataset",
    "IndexedDatasetBuilder": "megatron.data.indexed_dataset_builder",
}

_FORMER: dict[str, str] = {
    "Cache": "megatron.data.cache.IndexCache",
    "DataPaths": "megatron.data.dataset_builder.BlendPaths",
    "GPT2Samples": "megatron.data.gpt_dataset.GPTDataset",
    "MixedSamples": "megatron.data.blended_dataset.BlendedDataset",
    "ReplicaBatches": "megatron.data.data_loader.DataLoader",
    "SampleOrder": "megatron.data.blended_dataset.BlendSchedule",
    "TokenFile": "megatron.data.indexed_dataset.IndexedDataset",
    "TokenFileWriter": "megatron.data.indexed_dataset_builder.IndexedDatasetBuilder",
    "BertSamples": "megatron.models.bert.data.BertDataset",
    "BertTokens": "megatron.models.bert.data.BertTokens",
    "SpanFiles": "megatron.models.t5.span_files.SpanFiles",
    "SpanFileSamples": "megatron.models.t5.span_files.SpanFilesDataset",
    "T5Samples": "megatron.models.t5.data.T5Dataset",
    "T5Tokens": "megatron.models.t5.data.T5Tokens",
    "bert_fields": "megatron.models.bert.model.bert_fields",
    "bert_tokens": "megatron.models.bert.data.bert_tokens",
    "build_bert_train_valid_test": "megatron.models.bert.data.build_bert_train_valid_test",
    "build_t5_train_valid_test": "megatron.models.t5.span_files.build_t5_train_valid_test",
    "t5_fields": "megatron.models.t5.data.t5_fields",
    "t5_tokens": "megatron.models.t5.data.t5_tokens",
}
"""Names that were here -> what they are now, for one release."""

__all__ = [
    "BlendPaths",
    "BlendSchedule",
    "BlendedDataset",
    "DataLoader",
    "Fim",
    "GPTDataset",
    "IndexCache",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "SFTDataset",
    "build_sft_train_valid_test",
    "build_train_valid_test",
    "fim_from",
    "gpt2_fields",
    "resumed_order",
    "split_by_hash",
    "split_documents",
]


def __getattr__(name: str) -> Any:
    return look_up(__name__, name, _FORMER, _MODULES)

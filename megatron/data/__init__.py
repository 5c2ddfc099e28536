"""Token files, datasets whose sample order is computed on demand, and the loader for a replica's micro-batches.

Names are resolved on first use, so that preprocessing does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tds.lazy_imports import lazy_attribute

if TYPE_CHECKING:
    from megatron.data.blend_paths import BlendPaths
    from megatron.data.blend_resume import resumed_order
    from megatron.data.blend_schedule import BlendSchedule
    from megatron.data.blended_dataset import BlendedDataset
    from megatron.data.cache import IndexCache
    from megatron.data.data_loader import DataLoader
    from megatron.data.fim import Fim, fim_from
    from megatron.data.gpt_builder import build_train_valid_test
    from megatron.data.gpt_dataset import GPTDataset
    from megatron.data.gpt_fields import gpt2_fields
    from megatron.data.indexed_dataset import IndexedDataset
    from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder
    from megatron.data.sft_dataset import SFTDataset, build_sft_train_valid_test
    from megatron.data.split import split_by_hash, split_documents

_MODULES = {
    "IndexCache": "megatron.data.cache",
    "BlendPaths": "megatron.data.blend_paths",
    "Fim": "megatron.data.fim",
    "fim_from": "megatron.data.fim",
    "BlendedDataset": "megatron.data.blended_dataset",
    "DataLoader": "megatron.data.data_loader",
    "BlendSchedule": "megatron.data.blend_schedule",
    "build_sft_train_valid_test": "megatron.data.sft_dataset",
    "build_train_valid_test": "megatron.data.gpt_builder",
    "GPTDataset": "megatron.data.gpt_dataset",
    "SFTDataset": "megatron.data.sft_dataset",
    "gpt2_fields": "megatron.data.gpt_fields",
    "resumed_order": "megatron.data.blend_resume",
    "split_by_hash": "megatron.data.split",
    "split_documents": "megatron.data.split",
    "IndexedDataset": "megatron.data.indexed_dataset",
    "IndexedDatasetBuilder": "megatron.data.indexed_dataset_builder",
}

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
    return lazy_attribute(__name__, name, _MODULES)

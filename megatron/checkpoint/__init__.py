"""Checkpoints of named global tensors, loadable in any parallel layout.

Names resolve on first use (PEP 562), so that ``checkpoint_args``, which only reads settings, does not import torch.
"""

from __future__ import annotations

from typing import Any

from tds.lazy_imports import lazy_attribute

_NAMES = {
    "megatron.checkpoint.async_saving": ("AsyncSaver", "Committed", "Staged"),
    "megatron.checkpoint.folders": ("check_writable",),
    "megatron.checkpoint.loading": ("open_checkpoint", "open_latest", "open_newest"),
    "megatron.checkpoint.model_match": ("check_model", "compare_model_config"),
    "megatron.checkpoint.opened_checkpoint": ("Checkpoint",),
    "megatron.checkpoint.saving": ("CapturedState", "SyncSaver", "save"),
    "megatron.checkpoint.retention": ("RetentionPolicy",),
    "megatron.checkpoint.tensor_record": ("TensorRecord",),
    "megatron.models.common.parameters": ("named_parameters",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, name, _MODULES)

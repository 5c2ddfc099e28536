"""Checkpoints of named global tensors, without the layout that saved them."""

from megatron.checkpoint.folders import check_writable
from megatron.checkpoint.loading import Checkpoint, check_model, compare_model_config, open_checkpoint, open_latest
from megatron.checkpoint.metadata import TensorRecord
from megatron.checkpoint.saving import AsyncSaver, Committed, Staged, save
from megatron.models.common.parameters import named_parameters

__all__ = [
    "AsyncSaver",
    "Checkpoint",
    "Committed",
    "Staged",
    "TensorRecord",
    "check_model",
    "check_writable",
    "compare_model_config",
    "named_parameters",
    "open_checkpoint",
    "open_latest",
    "save",
]

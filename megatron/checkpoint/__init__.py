"""Checkpoints of named global tensors, without the layout that saved them."""

from megatron.checkpoint.background import BackgroundSaver, Durable, Staged
from megatron.checkpoint.compare import check_model, compare_model_config
from megatron.checkpoint.folders import check_writable
from megatron.checkpoint.loading import Checkpoint
from megatron.checkpoint.naming import named_parameters
from megatron.checkpoint.opening import open_checkpoint, open_latest
from megatron.checkpoint.records import TensorRecord
from megatron.checkpoint.saving import save

__all__ = [
    "BackgroundSaver",
    "Checkpoint",
    "Durable",
    "Staged",
    "TensorRecord",
    "check_writable",
    "check_model",
    "compare_model_config",
    "named_parameters",
    "open_checkpoint",
    "open_latest",
    "save",
]

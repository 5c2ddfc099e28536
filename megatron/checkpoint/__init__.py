"""Checkpoints of named global tensors, without the layout that saved them."""

from typing import Any

from megatron.checkpoint.folders import check_writable
from megatron.checkpoint.loading import Checkpoint, check_model, compare_model_config, open_checkpoint, open_latest
from megatron.checkpoint.metadata import TensorRecord
from megatron.checkpoint.saving import AsyncSaver, Committed, Staged, save
from megatron.models.common.parameters import named_parameters
from tds.deprecated_paths import look_up

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
_FORMER = {
    "BackgroundSaver": "megatron.checkpoint.saving.AsyncSaver",
    "Durable": "megatron.checkpoint.saving.Committed",
}
"""Names that were here -> what they are now, for one release."""


def __getattr__(name: str) -> Any:
    return look_up(__name__, name, _FORMER)

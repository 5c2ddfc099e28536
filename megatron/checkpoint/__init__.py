"""Checkpoints of named global tensors, without the layout that saved them.

Names resolve on first use (PEP 562), so that ``checkpoint_args``, which reads sizes, needs no torch.
"""

from __future__ import annotations

from typing import Any

from tds.deprecated_paths import look_up

_HOMES = {
    "megatron.checkpoint.folders": ("check_writable",),
    "megatron.checkpoint.loading": (
        "Checkpoint",
        "check_model",
        "compare_model_config",
        "open_checkpoint",
        "open_latest",
    ),
    "megatron.checkpoint.metadata": ("TensorRecord",),
    "megatron.checkpoint.saving": ("AsyncSaver", "Committed", "Staged", "save"),
    "megatron.models.common.parameters": ("named_parameters",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_FORMER = {
    "BackgroundSaver": "megatron.checkpoint.saving.AsyncSaver",
    "Durable": "megatron.checkpoint.saving.Committed",
}
"""Names that were here -> what they are now, for one release."""


def __getattr__(name: str) -> Any:
    return look_up(__name__, name, _FORMER, _HOME)

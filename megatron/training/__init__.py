"""The training loop: ``pretrain`` and the functions that Megatron scripts import.

Names are imported on first use, so that --help and --dry-run need neither torch nor DeepSpeed.
"""

from __future__ import annotations

from typing import Any

from tds.lazy_imports import lazy_attribute

_MODULES = {
    "pretrain": "megatron.training.startup",
    "get_args": "megatron.training.global_vars",
    "get_chat_template": "megatron.training.global_vars",
    "get_config": "megatron.training.global_vars",
    "get_data_paths": "megatron.training.global_vars",
    "get_tokenizer": "megatron.training.global_vars",
    "get_streams": "megatron.training.global_vars",
    "configure_device": "megatron.training.device_setup",
    "Callback": "megatron.training.trainer",
}


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, name, _MODULES)

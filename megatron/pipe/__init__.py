"""The model's layers laid out as pipeline stages: the only place that joins ``megatron.model`` and ``tds``.

Names resolve on first use, so that scripts start without torch and DeepSpeed.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "GPT2ModelPipe": "gpt2",
    "T5ModelPipe": "t5",
    "BertModelPipe": "bert",
    "LlamaModelPipe": "llama",
    "MptModelPipe": "mpt",
    "pipe_topology": "topology",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'megatron.pipe' has no attribute {name!r}")
    return getattr(importlib.import_module(f"megatron.pipe.{_HOME[name]}"), name)

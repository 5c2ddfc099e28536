"""Single-stage modules that take their groups as arguments and return tensors; they know nothing of DeepSpeed.

Names resolve on first use, so that scripts start without torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "BertModel": "bert",
    "BertSizes": "sizes",
    "bert_sizes_from": "sizes",
    "GPT2Model": "gpt2",
    "T5Model": "t5",
    "LlamaModel": "llama",
    "MptModel": "mpt",
    "Sizes": "sizes",
    "T5Sizes": "sizes",
    "LlamaSizes": "sizes",
    "MptSizes": "sizes",
    "Place": "sizes",
    "recompute_switches": "recompute",
    "sizes_from": "sizes",
    "t5_sizes_from": "sizes",
    "llama_sizes_from": "sizes",
    "mpt_sizes_from": "sizes",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'megatron.model' has no attribute {name!r}")
    return getattr(importlib.import_module(f"megatron.model.{_HOME[name]}"), name)

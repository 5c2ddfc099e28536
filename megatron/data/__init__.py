"""Token files, samples in a computed order, and the micro-batches of a replica.

Names are resolved on first use, so that preprocessing does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.data.batches import ReplicaBatches
    from megatron.data.build import build_train_valid_test
    from megatron.data.fields import gpt2_fields
    from megatron.data.gpt2_samples import GPT2Samples
    from megatron.data.split import split_documents
    from megatron.data.token_file import TokenFile
    from megatron.data.token_writer import TokenFileWriter

_MODULES = {
    "ReplicaBatches": "batches",
    "build_train_valid_test": "build",
    "GPT2Samples": "gpt2_samples",
    "gpt2_fields": "fields",
    "split_documents": "split",
    "TokenFile": "token_file",
    "TokenFileWriter": "token_writer",
}

__all__ = [
    "GPT2Samples",
    "ReplicaBatches",
    "TokenFile",
    "TokenFileWriter",
    "build_train_valid_test",
    "gpt2_fields",
    "split_documents",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

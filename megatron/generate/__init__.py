"""Text generation with a model in any layout; the tokens do not depend on the layout.

    from megatron.generate import generate_t5

    rows = generate_t5(model, sources, start_id=0, eos_id=1, max_new_tokens=64)

``model`` is a module without pipeline stages, the engine that trains a model, or the result of ``load``. Every rank of
the replica makes the call and receives all rows. Keys and values are cached: after the prompts, the model processes one
new token per row at a time. ``tools/generate.py`` is the command line tool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tds.lazy_imports import lazy_attribute

if TYPE_CHECKING:
    from megatron.generate.decode import generate_gpt2, generate_t5
    from megatron.generate.load_model import load, open_model
    from megatron.generate.sampling import Sampling, keys_of

__all__ = ["Sampling", "generate_gpt2", "generate_t5", "keys_of", "load", "open_model"]

_MODULES = {
    "Sampling": "megatron.generate.sampling",
    "generate_gpt2": "megatron.generate.decode",
    "generate_t5": "megatron.generate.decode",
    "keys_of": "megatron.generate.sampling",
    "load": "megatron.generate.load_model",
    "open_model": "megatron.generate.load_model",
}
"""Name -> module, imported on first use, so that the command's --help does not import torch."""


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, name, _MODULES)

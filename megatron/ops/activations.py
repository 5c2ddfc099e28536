"""Activation functions by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),  # Hugging Face's gelu_new, OpenAI's GPT-2
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation called ``name``.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"--activation must be one of {', '.join(sorted(ACTIVATIONS))}, got {name}")
    return ACTIVATIONS[name]

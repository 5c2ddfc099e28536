"""Activation functions by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from megatron.ops.gelu import gelu
from megatron.ops.relu import relu

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": gelu,
    "gelu-tanh": partial(gelu, approximate="tanh"),  # Hugging Face's gelu_new, OpenAI's GPT-2
    "relu": relu,
    "gated-gelu": partial(gelu, approximate="tanh"),  # of the gate, as in T5 v1.1 and mT5
    "gated-silu": F.silu,
}


def activation(name: str) -> Activation:
    """Return the activation called ``name``; of the gate, if it is a gated one.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"--activation must be one of {', '.join(sorted(ACTIVATIONS))}, got {name}")
    return ACTIVATIONS[name]


def is_gated(name: str) -> bool:
    """Return whether the feed-forward layer multiplies its activation with a second product of the same input."""
    return name.startswith("gated-")

"""Weights without values, which take no memory until they are filled, in a model that is being built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


def is_unset(parameter: torch.Tensor) -> bool:
    """Return whether ``empty_weight`` made ``parameter`` and nothing has filled it."""
    return bool(getattr(parameter, "is_unset", False))


@contextmanager
def without_memory() -> Iterator[None]:
    """Let every unset weight keep its shape alone from the moment that a module gets it; ``give_memory`` ends that.

    Until then it reads as zeros, and what writes to it gets torch's error of a single memory location.
    """

    def drop(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and is_unset(parameter):
            parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)

    hook = register_module_parameter_registration_hook(drop)
    try:
        yield
    finally:
        hook.remove()


def give_memory(parameter: torch.Tensor) -> None:
    """Let an unset ``parameter`` have memory of its own, of zeros, if it has none."""
    if parameter.untyped_storage().nbytes() < parameter.nbytes:
        parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)

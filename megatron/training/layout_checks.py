"""Checks that the model's layers implement the requested sequence and context parallelism."""

from __future__ import annotations

import torch

from megatron.errors import ConfigError
from megatron.models.common.parallel_context import context_of


def check_sequence_is_cut(module: torch.nn.Module, is_asked_for: bool) -> None:
    """Check that the layers of ``module``, a model or a stage, shard the sequence if and only if the flag is set.

    Raises:
        ConfigError: layers and --sequence-parallel disagree.
    """
    if any(map(_cuts, module.modules())) == is_asked_for:
        return
    if is_asked_for:
        raise ConfigError(
            f"--sequence-parallel needs layers that are built for it, got none in {type(module).__name__}. Build them "
            "with megatron.models.ParallelContext(group, streams, sequence_parallel=True), or leave the flag out"
        )
    raise ConfigError(
        f"layers of {type(module).__name__} are built with sequence_parallel=True, got no --sequence-parallel. "
        "Add the flag, or build them with sequence_parallel=False"
    )


def _cuts(module: torch.nn.Module) -> bool:
    """Return True if ``module`` is built for sequence parallelism."""
    context = context_of(module)
    has_context = context is not None and context.sequence_parallel
    return has_context or bool(getattr(module, "sequence_parallel", False))  # attribute of megatron.mpu's layers


def check_context_is_cut(module: torch.nn.Module, size: int) -> None:
    """Check that the attention of ``module``, a model or a stage, is built for a context group of ``size`` ranks.

    Raises:
        ConfigError: it is not, so that tokens of other ranks would be ignored.
    """
    contexts = map(context_of, module.modules())
    built = {context.context.size for context in contexts if context is not None}
    if size > 1 and built != {size}:
        raise ConfigError(
            f"--context-parallel-size {size} needs layers that are built for this size, got "
            f"{', '.join(map(str, sorted(built))) or 'none'} in {type(module).__name__}. Build them with "
            "megatron.models.ParallelContext(..., context=mpu.get_grid().context), or leave the flag out"
        )

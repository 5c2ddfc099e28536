"""Checks that the model's layers implement the requested sequence and context parallelism."""

from __future__ import annotations

import torch

from megatron.errors import ConfigError
from megatron.models.common.parallel_context import get_parallel_context


def check_sequence_parallel(module: torch.nn.Module, is_enabled: bool) -> None:
    """Check that the layers in ``module``, a model or a stage, shard the sequence if and only if the flag is set.

    Raises:
        ConfigError: layers and --sequence-parallel disagree.
    """
    if any(map(_is_sequence_parallel, module.modules())) == is_enabled:
        return
    if is_enabled:
        raise ConfigError(
            f"--sequence-parallel needs layers that are built for it, got none in {type(module).__name__}. Build them "
            "with megatron.models.ParallelContext(group, streams, sequence_parallel=True), or leave the flag out"
        )
    raise ConfigError(
        f"layers of {type(module).__name__} are built with sequence_parallel=True, got no --sequence-parallel. "
        "Add the flag, or build them with sequence_parallel=False"
    )


def _is_sequence_parallel(module: torch.nn.Module) -> bool:
    ctx = get_parallel_context(module)
    is_context_sequence_parallel = ctx is not None and ctx.sequence_parallel
    return is_context_sequence_parallel or bool(
        getattr(module, "sequence_parallel", False)
    )  # attribute of megatron.mpu's layers


def check_context_parallel(module: torch.nn.Module, size: int) -> None:
    """Check that attention in ``module``, a model or a stage, is built for a context group with ``size`` ranks.

    Raises:
        ConfigError: it is not, so that other ranks' tokens would be ignored.
    """
    contexts = map(get_parallel_context, module.modules())
    built_sizes = {ctx.context.size for ctx in contexts if ctx is not None}
    if size > 1 and built_sizes != {size}:
        raise ConfigError(
            f"--context-parallel-size {size} needs layers that are built for this size, got "
            f"{', '.join(map(str, sorted(built_sizes))) or 'none'} in {type(module).__name__}. Build them with "
            "megatron.models.ParallelContext(..., context=mpu.get_grid().context), or leave the flag out"
        )

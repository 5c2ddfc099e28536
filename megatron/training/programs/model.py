"""Construction of the built-in models, for the ``model_provider`` in their programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron import models, mpu
from megatron.models import registry
from megatron.training import get_config, get_streams

if TYPE_CHECKING:
    import torch


def build_model(get_batch_pipe: Callable[[Any], tuple[tuple[Any, ...], tuple[Any, ...]]]) -> torch.nn.Module:
    """Build this rank's model shard: a tensor slice and, with a pipeline, a stage.

    Args:
        get_batch_pipe: with a pipeline, returns the first stage's inputs and the loss arguments.
    """
    config, grid = get_config(), mpu.get_grid()
    parallel = config.parallel
    parallel_context = models.ParallelContext(
        grid.tensor,
        get_streams(),
        parallel.sequence_parallel,
        context=grid.context,
        cp_comm_type=parallel.cp_comm_by_layer,
        context_inner=grid.context_inner,
        context_outer=grid.context_outer,
        expert=grid.expert,
        expert_tensor=grid.expert_tensor,
    )
    return registry.build_model(config, parallel_context, grid.topology, get_batch_pipe)

"""Construction of engines with DeepSpeed's interface: tds's engine for a pipeline, DeepSpeed's engine otherwise."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

import tds
from megatron.arguments.deepspeed_json import engine_dict
from megatron.arguments.deepspeed_keys import engine_features
from megatron.config import Config
from megatron.mpu.groups import Grid, groups_by_ranks
from megatron.optim import MixedPrecisionOptimizer
from megatron.training.deepspeed_mpu import DeepSpeedMpu
from megatron.training.device_setup import check_deepspeed_device
from megatron.training.world import World
from megatron.training.zero3_init import is_weight_sharded, without_deepspeed_broadcast
from tds.deepspeed.alias import import_deepspeed


def reasons_for_deepspeed(config: Config, module: torch.nn.Module) -> list[str]:
    """List the reasons to train on the DeepSpeed engine without a pipeline; empty if it is not needed."""
    reasons = engine_features(config.deepspeed)
    if config.run.verbose_deepspeed:
        reasons.append("--verbose-deepspeed")
    if config.checkpoint.is_deepspeed:
        reasons.append("--checkpoint-format deepspeed")
    if any(hasattr(child, "set_deepspeed_parallelism") for child in module.modules()):
        reasons.append("layers of DeepSpeed in the model")
    return reasons


def initialize_loaded_deepspeed(device_type: str) -> None:
    """Initialize DeepSpeed's communication if the script has imported DeepSpeed. Collective.

    A model may call ``deepspeed.checkpointing`` or ``deepspeed.comm``, regardless of the engine.

    Args:
        device_type: the run's device type.

    Raises:
        ConfigError: DeepSpeed uses another device type.
    """
    if "deepspeed" not in sys.modules:
        return
    check_deepspeed_device(device_type)
    deepspeed = import_deepspeed()
    tds.quiet()
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def sharing_groups_of(grid: Grid) -> AbstractContextManager[None]:
    """Make DeepSpeed reuse the process groups in ``grid`` within the context, instead of creating new ones."""
    from tds.deepspeed.api import sharing_groups  # imports DeepSpeed

    return sharing_groups(groups_by_ranks(grid))


def build_pipeline_engine(
    config: Config, world: World, module: torch.nn.Module, optimizer: MixedPrecisionOptimizer
) -> Any:
    """Build a ``tds.PipelineEngine`` for a pipeline module. Collective."""
    return _initialize(config, world, module, optimizer, mpu=None)


def build_deepspeed_engine(
    config: Config, world: World, module: torch.nn.Module, optimizer: MixedPrecisionOptimizer
) -> Any:
    """Build the DeepSpeed engine for a model without a pipeline. Collective."""
    return _initialize(config, world, module, optimizer, mpu=DeepSpeedMpu(world.grid))


def _initialize(
    config: Config,
    world: World,
    module: torch.nn.Module,
    optimizer: MixedPrecisionOptimizer,
    mpu: DeepSpeedMpu | None,
) -> Any:
    check_deepspeed_device(world.device_type)
    tds.quiet(not config.run.verbose_deepspeed)
    settings = engine_dict(config, world.grid.topology.world_size)
    with (
        without_deepspeed_broadcast(module, is_deferred=is_weight_sharded(config, world)),
        sharing_groups_of(world.grid),
    ):
        engine, *_ = tds.initialize(model=module, optimizer=optimizer, config=settings, mpu=mpu)
    return engine
